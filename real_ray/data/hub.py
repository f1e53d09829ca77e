"""What went wrong with a name on the Hugging Face hub, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal


def explain_hub_error(
    name: str, error: Exception, *, kind: Literal["model", "dataset"]
) -> str | None:
    """Turn an error of transformers or datasets about a hub name into one message for a user.

    Returns:
        The message, or None if the error is not about reaching the hub.
    """
    from huggingface_hub import is_offline_mode

    # By class name: both libraries wrap the hub's errors in their own, in several ways.
    names = {type(cause).__name__ for cause in _causes(error)}
    page = f"https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{name}"
    download = f"hf download {name}{' --repo-type dataset' if kind == 'dataset' else ''}"
    absent = f"{kind} `{name}`: there is no such directory here"
    if "HFValidationError" in names:
        return f"{absent}, and it cannot be a name on the Hugging Face hub: {error}"
    if "GatedRepoError" in names or " gated " in str(error):
        return (
            f"{kind} `{name}` is gated: accept its terms at {page} and set HF_TOKEN to a token of "
            "that account"
        )
    if names & {"RepositoryNotFoundError", "DatasetNotFoundError"}:
        return (
            f"{absent}, and no public {kind} of that name on the Hugging Face hub. Check the "
            "spelling; for a private one set HF_TOKEN"
        )
    if not names & {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError"}:
        return None
    if is_offline_mode():
        return (
            f"{absent}, it is not in the Hugging Face cache, and HF_HUB_OFFLINE forbids the "
            f"download. Unset HF_HUB_OFFLINE, or run `{download}` beforehand"
        )
    return (
        f"{absent}, and the Hugging Face hub cannot be reached. Run `{download} --local-dir DIR` "
        "where there is a network, and give DIR instead of the name"
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
