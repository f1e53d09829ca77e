"""scripts/install.sh in a copy of the checkout, with small shell scripts as Python and pip."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CANDIDATES = ("python3.11", "python3.12", "python3", "python")
PYTORCH_INDEX = "https://download.pytorch.org/whl/cpu"

# $FAKE_PIP chooses what pip does; $CALLS lists how it was called.
FAKE_PYTHON = """\
#!/usr/bin/env bash
pip() {
    echo "$*" >>"$CALLS"
    case "$FAKE_PIP" in
    offline)
        echo "WARNING: Retrying after connection broken by 'NewConnectionError(...)'"
        echo "ERROR: No matching distribution found for torch"
        exit 1 ;;
    disk_full)
        echo "ERROR: Could not install packages: [Errno 28] No space left on device: '/x'"
        exit 1 ;;
    no_torch)
        if [[ "$*" == *torch==* && "$*" != *--extra-index-url* ]]; then
            echo "ERROR: No matching distribution found for torch"
            exit 1
        fi ;;
    broken)
        echo "ERROR: something before it"
        echo "error: subprocess-exited-with-error"
        echo "note: This is no fault of pip"
        exit 1 ;;
    hang) read -r <"$CALLS.fifo" ;;
    esac
}
case "$*" in
"-c import platform"*) echo VERSION ;;
"-c import ensurepip"*) exit NO_VENV ;;
"-m venv --clear "*)
    mkdir -p "$4/bin"
    rm -f "$4/install.state"
    cp "$0" "$4/bin/python"
    echo "command = $0 $*" >"$4/pyvenv.cfg" ;;
"-m pip --version") ;;
"-m pip "*) pip "$@" ;;
*) echo "unexpected: $*" >&2; exit 9 ;;
esac
"""


class Checkout:
    """A copy of what the script reads, on a machine where no Python runs until one is added."""

    def __init__(self, root: Path) -> None:
        self.root = root / "checkout"
        self.bin = root / "bin"
        self.calls = root / "calls"
        self.bin.mkdir(parents=True)
        for name in ("scripts", "requirements"):
            shutil.copytree(ROOT / name, self.root / name)
        shutil.copy(ROOT / "pyproject.toml", self.root)
        for name in CANDIDATES:  # what a pyenv shim does for a version that is not installed
            self.add_command(name, "echo 'pyenv: command not found' >&2; exit 127")
        self.add_command("df", "echo; echo fs 9e9 0 99999999 0% /")

    def add_command(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(body if body.startswith("#!") else f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(0o755)

    def add_python(self, name: str, version: str, *, venv: bool = True) -> None:
        body = FAKE_PYTHON.replace("VERSION", version).replace("NO_VENV", "0" if venv else "1")
        self.add_command(name, body)

    def start(self, *args: str, pip: str = "works", **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.root / "scripts" / "install.sh", *args],
            env={
                "PATH": f"{self.bin}:{os.environ['PATH']}",
                "CALLS": str(self.calls),
                "FAKE_PIP": pip,
                **env,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def install(self, *args: str, pip: str = "works", **env: str) -> str:
        """Install, expecting success; return what was printed."""
        out, err = (process := self.start(*args, pip=pip, **env)).communicate(timeout=30)
        assert (process.returncode, err) == (0, "")
        return out

    def refuse(self, *args: str, pip: str = "works", **env: str) -> str:
        """Install, expecting failure; return the one sentence on stderr."""
        _, err = (process := self.start(*args, pip=pip, **env)).communicate(timeout=30)
        assert process.returncode == 1
        assert err.startswith("real-ray: ")
        assert err.endswith("\n")
        assert err.count("\n") == 1
        return err

    def take_calls(self) -> list[str]:
        """The calls of pip since the last time."""
        calls = self.calls.read_text().splitlines() if self.calls.exists() else []
        self.calls.unlink(missing_ok=True)
        return calls


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.fixture
def installed(checkout: Checkout) -> Checkout:
    checkout.add_python("python3.11", "3.11.7")
    checkout.install()
    checkout.take_calls()
    return checkout


def test_installs_exact_requirements_without_their_dependencies(checkout: Checkout) -> None:
    checkout.add_python("python3.11", "3.11.7")
    out = checkout.install()
    calls = checkout.take_calls()
    assert "Python 3.11.7" in out
    assert "a few minutes and 3.5 GB" in out
    assert all("--no-deps" in call for call in calls)
    assert any(call.endswith("torch==2.13.0+cpu") for call in calls)
    assert any(call.endswith("--no-build-isolation -r requirements/cpu.txt") for call in calls)
    assert calls[-1].endswith("--no-build-isolation -e .")
    assert not any("--extra-index-url" in call or "dev.txt" in call for call in calls)


def test_second_run_does_nothing(installed: Checkout) -> None:
    assert installed.install() == "real-ray: .venv is up to date\n"
    assert installed.take_calls() == []


def test_dev_tools_are_added_to_an_existing_installation_and_kept(installed: Checkout) -> None:
    installed.install("--dev")
    assert any("-r requirements/dev.txt" in call for call in installed.take_calls())
    installed.install("--dev")
    installed.install()
    assert installed.take_calls() == []


@pytest.mark.parametrize("name", ["requirements/cpu.txt", "requirements/dev.txt", "pyproject.toml"])
def test_a_changed_file_brings_an_update(installed: Checkout, name: str) -> None:
    with (installed.root / name).open("a") as file:
        file.write("# changed\n")
    assert "updating .venv" in installed.install()
    assert installed.take_calls()


def test_a_moved_checkout_is_installed_anew(installed: Checkout) -> None:
    moved = installed.root.rename(installed.root.with_name("moved"))
    installed.root = moved
    assert "installing into .venv" in installed.install()
    assert str(moved) in (moved / ".venv/pyvenv.cfg").read_text()


def test_python_of_the_user_replaces_another(installed: Checkout) -> None:
    installed.add_python("mine", "3.12.4")
    assert "Python 3.12.4" in installed.install(PYTHON="mine")
    assert "up to date" in installed.install(PYTHON="mine")
    assert "up to date" in installed.install()


def test_takes_the_first_python_that_runs_and_is_supported(checkout: Checkout) -> None:
    checkout.add_python("python3.12", "3.12.1", venv=False)
    checkout.add_python("python3", "3.13.0")
    checkout.add_python("python", "3.12.9")
    assert "Python 3.12.9" in checkout.install()


def test_unsupported_python(checkout: Checkout) -> None:
    checkout.add_python("python3", "3.10.13")
    checkout.add_python("python", "2.7.18")
    sentence = checkout.refuse()
    assert "Python 3.11 or 3.12 is needed" in sentence
    assert "python3 is 3.10.13, python is 2.7.18" in sentence
    assert "PYTHON=" in sentence


def test_no_python_at_all(checkout: Checkout) -> None:
    assert "Python 3.11 or 3.12 is needed" in checkout.refuse()


def test_unsupported_python_of_the_user_is_not_replaced(checkout: Checkout) -> None:
    checkout.add_python("python3.11", "3.11.7")
    checkout.add_python("mine", "3.13.0")
    assert "mine is 3.13.0" in checkout.refuse(PYTHON="mine")


def test_missing_venv_module(checkout: Checkout) -> None:
    checkout.add_python("python3", "3.12.3", venv=False)
    sentence = checkout.refuse()
    assert "python3 has no venv module" in sentence
    assert "apt install python3.12-venv" in sentence


def test_no_network(checkout: Checkout) -> None:
    checkout.add_python("python3.11", "3.11.7")
    assert "no network" in checkout.refuse(pip="offline")
    assert len(checkout.take_calls()) == 1  # PyTorch's index is no cure for it


def test_disk_full_while_installing(checkout: Checkout) -> None:
    checkout.add_python("python3.11", "3.11.7")
    assert "the disk ran full" in checkout.refuse(pip="disk_full")


def test_disk_too_full_to_start(checkout: Checkout) -> None:
    checkout.add_python("python3.11", "3.11.7")
    checkout.add_command("df", "echo; echo fs 9e9 0 3145728 0% /")
    sentence = checkout.refuse()
    assert "3 GB free" in sentence
    assert "needs 6 GB" in sentence
    assert checkout.take_calls() == []


def test_any_other_failure_shows_the_last_error_and_the_log(checkout: Checkout) -> None:
    checkout.add_python("python3.11", "3.11.7")
    sentence = checkout.refuse(pip="broken")
    assert "installation failed: error: subprocess-exited-with-error; see .venv" in sentence
    assert "This is no fault of pip" in (checkout.root / ".venv/install.log").read_text()


def test_pytorch_index_is_used_for_torch_alone_and_only_when_needed(checkout: Checkout) -> None:
    checkout.add_python("python3.11", "3.11.7")
    checkout.install(pip="no_torch")
    (call,) = [call for call in checkout.take_calls() if "--extra-index-url" in call]
    assert call.endswith(f"--extra-index-url {PYTORCH_INDEX} torch==2.13.0+cpu")


def test_no_other_index_is_named() -> None:
    script = (ROOT / "scripts/install.sh").read_text()
    assert script.count("://") == script.count(PYTORCH_INDEX) == 1


def test_failed_installation_is_tried_again(checkout: Checkout) -> None:
    checkout.add_python("python3.11", "3.11.7")
    checkout.refuse(pip="offline")
    assert "installed; try" in checkout.install()


def test_killed_installation_is_repaired_from_scratch(installed: Checkout) -> None:
    fifo = Path(f"{installed.calls}.fifo")
    os.mkfifo(fifo)
    process = installed.start("--dev", pip="hang")
    with fifo.open("w"):  # opens when pip has begun
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)
    assert "installing into .venv" in installed.install("--dev")
    assert "up to date" in installed.install("--dev")


def test_macos_and_other_machines(checkout: Checkout) -> None:
    checkout.add_python("python3.11", "3.11.7")
    checkout.add_command("uname", '[[ "$1" == -s ]] && echo Darwin || echo arm64')
    assert "macOS" in checkout.refuse()
    checkout.add_command("uname", '[[ "$1" == -s ]] && echo Linux || echo ppc64le')
    assert "x86-64 or aarch64" in checkout.refuse()


def test_unknown_option(checkout: Checkout) -> None:
    assert "unknown option --gpu" in checkout.refuse("--gpu")
