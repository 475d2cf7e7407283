"""Check of the running movers and dispatchers: whether they know the features in use."""

from __future__ import annotations

from delaylevel.model.features import FEATURES, FEATURES_PROPERTY, VERSION_PROPERTY
from delaylevel.model.level_topic import Role

from .context import LevelTopicContext
from .finding import CheckResult, Problem

_READ = (Role.LEVEL, Role.HELD, Role.WINDOW)


def features(context: LevelTopicContext) -> CheckResult:
    """Check that every connected mover and dispatcher knows the features of the level topic.

    One that knows features stops by itself. One from before features continues, and would deliver
    control records as messages. It does not show what it knows.
    """
    used = context.description.features
    if not used:
        return CheckResult(note="none in use")
    unaware: dict[tuple[str, str], tuple[str, list[str]]] = {}
    count = 0
    for row in context.status.rows(*_READ):
        for consumer in row.subscription.consumers if row.subscription else ():
            count += 1
            known = consumer.properties.get(FEATURES_PROPERTY, "").split(",")
            missing = [name for name in used if name not in known]
            if missing:
                version = consumer.properties.get(VERSION_PROPERTY, "unknown version")
                unaware[consumer.name, consumer.address] = version, missing
    problems = [
        Problem(
            f"{name}{f' at {address}' if address else ''} ({version}) does not know the feature "
            f"{' and '.join(map(repr, missing))}: it makes control records dead letters, or "
            "delivers them as messages if it is from before features",
            f"stop it, and start it again with delaylevel {_newest(missing)} or later "
            "(docs/versions.md)",
        )
        for (name, address), (version, missing) in sorted(unaware.items())
    ]
    rule = "every mover, dispatcher and new producer must know it" if len(used) == 1 else ""
    rule = rule or "every mover, dispatcher and new producer must know them"
    return CheckResult.of(
        problems, f"{', '.join(used)}: {rule}; all {count} connected consumers do"
    )


def _newest(features: list[str]) -> str:
    return max((FEATURES[name] for name in features), key=_number)


def _number(version: str) -> list[int]:
    return [int(part) if part.isdecimal() else 0 for part in version.split(".")]
