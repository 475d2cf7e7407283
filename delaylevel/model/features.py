"""Features of level topics: what a reader or writer of a level topic has to know.

The description of a level topic lists the features that are in use, each with the first version
that knows it. A version that does not know all of them refuses the level topic, and names the
versions that do. docs/versions.md has the rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from delaylevel import __version__
from delaylevel.errors import InvalidInputError, UpgradeRequiredError

#: The formats of a description. The first one is that of a level topic that uses no feature, so
#: that earlier versions, which know no features, understand exactly those level topics.
WITHOUT_FEATURES, WITH_FEATURES = 1, 2

#: Messages of the level topic can be cancelled.
CANCEL = "cancel"

#: Name of each feature that this version knows -> first version that knows it. The versions are
#: stored in descriptions and never change.
FEATURES: dict[str, str] = {CANCEL: "0.1.0"}


#: Properties of the consumers of movers and dispatchers: the version of the process, and the names
#: of the features that it knows, separated by commas.
VERSION_PROPERTY, FEATURES_PROPERTY = "delaylevel.version", "delaylevel.features"


def consumer_properties() -> dict[str, str]:
    """Return the properties by which a consumer shows what its process knows."""
    return {VERSION_PROPERTY: __version__, FEATURES_PROPERTY: ",".join(sorted(FEATURES))}


def check_known(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of features, sorted and each once.

    Raises:
        InvalidInputError: this version does not know one of them.
    """
    found = sorted(set(names))
    unknown = [name for name in found if name not in FEATURES]
    if unknown:
        raise InvalidInputError(
            f"{_words(unknown)}: delaylevel {__version__} knows no such feature "
            f"(it knows {_words(sorted(FEATURES)) or 'none'})"
        )
    return tuple(found)


def read_features(topic: str, value: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the features in the stored description of a level topic.

    Args:
        topic: full name of the level topic.
        value: the description as parsed JSON. Every format after the first keeps the meaning of
            ``version`` and ``features``, so that the error for a later format names versions, too.

    Raises:
        UpgradeRequiredError: the format is a later one, or this version does not know a feature.
        ValueError: ``features`` does not fit the format.
    """
    version, stored = value["version"], value.get("features")
    names = _names(stored)
    unknown = {name: names[name] for name in sorted(names) if name not in FEATURES}
    if version not in (WITHOUT_FEATURES, WITH_FEATURES):
        remedy = f"; it uses {_with_versions(unknown)}" if unknown else ""
        raise UpgradeRequiredError(
            f"level topic {topic} is described in format {version}; this release understands "
            f"format {WITHOUT_FEATURES} and format {WITH_FEATURES}: upgrade delaylevel{remedy}",
            features=unknown,
        )
    if version == WITHOUT_FEATURES:
        if "features" in value:
            raise ValueError(f"features need format {WITH_FEATURES}, and this is format {version}")
        return ()
    if not names:
        raise ValueError(f"features is {stored!r}, not names with versions")
    if unknown:
        raise UpgradeRequiredError(
            f"level topic {topic} uses {_with_versions(unknown)}, which this delaylevel "
            f"{__version__} does not know: upgrade it",
            features=unknown,
        )
    return tuple(sorted(names))


def _names(stored: object) -> dict[str, str]:
    """Return the names with their versions; empty if the value is anything else."""
    if isinstance(stored, dict) and all(
        isinstance(text, str) and text for item in stored.items() for text in item
    ):
        return stored
    return {}


def _with_versions(features: Mapping[str, str]) -> str:
    return " and ".join(
        f"the feature {name[:40]!r} (delaylevel {since[:40]} or later)"
        for name, since in features.items()
    )


def _words(names: Iterable[str]) -> str:
    return ", ".join(repr(name[:40]) for name in names)
