"""The values that a process reports over HTTP, and the protocol of what reports them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from delaylevel.errors import ConfigError, DelayLevelError

#: Environment variable with the token of live queries, for both sides.
TOKEN_VARIABLE = "DELAYLEVEL_LIVE_TOKEN"
#: Parameter of a live query: the dispatcher that is asked, if several answer at one address.
DISPATCHER = "dispatcher"
#: Environment variable with the token of actions; a process without it takes none.
ACTION_TOKEN_VARIABLE = "DELAYLEVEL_ACTION_TOKEN"
#: The least length of the token of actions: nobody finds it by trial.
LEAST_TOKEN = 16


def tokens(environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the tokens of live queries and of actions; empty for none."""
    live = environment.get(TOKEN_VARIABLE, "").strip()
    acting = environment.get(ACTION_TOKEN_VARIABLE, "").strip()
    if acting and len(acting) < LEAST_TOKEN:
        raise ConfigError(
            f"the token in {ACTION_TOKEN_VARIABLE} has {len(acting)} characters: give at least "
            f"{LEAST_TOKEN}, for example those of `openssl rand -hex 16`"
        )
    if acting and acting == live:
        raise ConfigError(
            f"{ACTION_TOKEN_VARIABLE} and {TOKEN_VARIABLE} have the same token: give different "
            "ones, because `delaylevel pending` sends that of live queries to every process that "
            "announces itself as a dispatcher"
        )
    return live, acting


class QueryRefusedError(DelayLevelError):
    """A request that is answered with another status than 200.

    A live query: 400 for a wrong question, 404 for a topic that is not served, 409 for another
    attribute, 503 if it can be asked again later.
    """

    def __init__(self, message: str, status: int = 400, *headers: tuple[str, str]) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


class ProbeCheck(NamedTuple):
    """One condition of a probe; the text has the remedy if it is not met."""

    name: str
    ok: bool
    text: str


class DuePeriod(NamedTuple):
    """A number of messages or entries that are due in a period; late ones should be released."""

    label: str
    messages: int
    late: bool = False


class PartitionLine(NamedTuple):
    """One partition of the status page; without a state if another process owns it."""

    partition: int
    owner: str
    here: bool
    state: str = ""
    pending: int = 0
    overdue_ms: int = 0  # since the earliest due time of the pending ones


class ProblemLine(NamedTuple):
    """A problem, and its remedy."""

    problem: str
    remedy: str


@dataclass(frozen=True)
class StatusSection:
    """The state of one level topic in this process; held messages are counted by target."""

    title: str
    facts: Mapping[str, str]
    periods: Sequence[DuePeriod] = ()
    parked: Sequence[DuePeriod] = ()
    partitions: Sequence[PartitionLine] = ()
    held: Mapping[str, int] | None = None
    problems: Sequence[ProblemLine] = ()


class LiveAnswer(NamedTuple):
    """The answer to a live query."""

    content_type: str
    body: bytes


class Reporter(Protocol):
    """A part of a process that reports its state, and collects metrics; several threads call it."""

    def alive(self) -> Sequence[ProbeCheck]:
        """Return the conditions without which the process should be restarted."""
        return ()

    def ready(self) -> Sequence[ProbeCheck]:
        """Return the conditions without which the process does not do its work."""
        ...

    def status(self) -> Sequence[StatusSection]:
        """Return the sections of the status page."""
        ...

    def answer(self, question: str, parameters: Mapping[str, str]) -> LiveAnswer | None:
        """Answer ``pending``, ``average`` or ``counts``; None if that is not this part's matter."""
        return None

    def served_at(self, url: str) -> None:
        """Take note of the address at which the process answers."""
        return


class ActionTopic(NamedTuple):
    """A level topic on the page of actions; begin of pauses in ms by target, ``*`` for all."""

    topic: str
    targets: Sequence[str]
    paused: Mapping[str, int]


class ActionReport(NamedTuple):
    """The outcome of an action, with the status of the answer, and the messages.

    It is 404 if nothing matches, 409 if the state does not allow it, 503 if it may succeed later.
    """

    status: int
    text: str
    rows: Sequence[Mapping[str, Any]] = ()


class Actions(Protocol):
    """Changes that a person may make. Several threads read, and one at a time acts."""

    def topics(self) -> Sequence[ActionTopic]:
        """Return the level topics that can be acted on."""
        ...

    def act(self, action: str, parameters: Mapping[str, str]) -> ActionReport:
        """Return the outcome of one of ``ACTIONS``; raise nothing that a person can cause."""
        ...


#: Names of the actions.
ACTIONS = ("pause", "resume", "find", "cancel", "fire")
