"""Ledger: every group drawn is in exactly one state."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from real_ray.errors import LedgerError
from real_ray.ledger import Ledger, Outcome


def drawn(*numbers: int) -> Ledger:
    ledger = Ledger()
    for number in numbers:
        ledger.draw(number, f"p:{number}")
    return ledger


def test_what_was_lost_is_named() -> None:
    ledger = drawn(0, 1, 2)
    ledger.close("p:1", Outcome.FAILED)
    ledger.check(["p:0", "p:2"])
    with pytest.raises(LedgerError, match=r"1 groups were drawn and are lost: p:2$"):
        ledger.check(["p:0"])
    with pytest.raises(LedgerError, match=r"in the pipeline and were not drawn: p:1, p:7"):
        ledger.check(["p:0", "p:1", "p:2", "p:7"])


def test_a_long_list_of_lost_groups_is_cut() -> None:
    with pytest.raises(LedgerError, match=r"20 groups .* lost: p:0, p:1, p:10, p:11, p:12 \.\.\.$"):
        drawn(*range(20)).check([])


def test_a_group_is_drawn_once_and_closed_once() -> None:
    ledger = drawn(0, 1)
    with pytest.raises(LedgerError, match=r"p:1 \(draw 1\) is drawn a second time"):
        ledger.draw(1, "p:1")
    ledger.close("p:1", Outcome.TRAINED)
    with pytest.raises(LedgerError, match="p:1 cannot be trained: it is not open"):
        ledger.close("p:1", Outcome.TRAINED)
    with pytest.raises(LedgerError, match=r"draw 1\) is drawn a second time"):
        ledger.draw(1, "p:1")
    ledger.close("p:0", Outcome.TRAINED)
    with pytest.raises(LedgerError, match=r"draw 0\) is drawn a second time"):
        ledger.draw(0, "p:0")


CLOSINGS = st.tuples(st.integers(0, 100), st.sampled_from(Outcome))


@given(actions=st.lists(st.none() | CLOSINGS, max_size=80))
def test_it_closes_whatever_the_order_and_goes_on_from_its_state(
    actions: list[tuple[int, Outcome] | None],
) -> None:
    """None draws a group; anything else closes one of the open ones."""
    ledger, open_numbers, ended = Ledger(), [], dict.fromkeys(Outcome, 0)
    number, closed = 0, set()
    for action in actions:
        if action is None:
            ledger.draw(number, f"p:{number}")
            open_numbers.append(number)
            number += 1
        elif open_numbers:
            index, outcome = action
            closing = open_numbers.pop(index % len(open_numbers))
            ledger.close(f"p:{closing}", outcome)
            closed.add(closing)
            ended[outcome] += 1
        ledger.check(f"p:{n}" for n in open_numbers)
        assert ledger.num_drawn == number
        assert {o: ledger.count(o) for o in Outcome} == ended
    continued = Ledger(ledger.state())
    assert {n for n in range(number) if continued.is_closed(n)} == closed
    assert continued.state().closed_below == min(set(range(number + 1)) - closed)
    assert {o: continued.count(o) for o in Outcome} == ended
    assert continued.num_drawn == len(closed), "open groups are drawn again"
    for open_number in open_numbers:
        continued.draw(open_number, f"p:{open_number}")
    continued.check(f"p:{n}" for n in open_numbers)
    assert continued.state() == ledger.state()


def test_sums_that_differ_are_noticed() -> None:
    state = drawn(0).state()
    wrong = type(state)(closed_below=3, closed=(), outcomes={"trained": 2})
    with pytest.raises(LedgerError, match="3 groups are closed and 2 have an outcome"):
        Ledger(wrong).check([])


def test_its_size_does_not_grow_with_the_run() -> None:
    ledger = drawn(*range(8))
    for number in range(8, 5000, 2):
        ledger.draw(number, f"p:{number}")
        ledger.draw(number + 1, f"p:{number + 1}")
        for closing in (number - 7, number - 8):  # not in their order
            ledger.close(f"p:{closing}", Outcome.TRAINED)
        assert len(ledger.state().closed) == 0
    ledger.close("p:4999", Outcome.FAILED)
    assert ledger.state().closed == (4999,)
    assert ledger.state().closed_below == 4992
