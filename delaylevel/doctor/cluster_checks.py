"""Checks of the cluster itself: is it there, may we ask it, and what time does it think it is?"""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from delaylevel.errors import AdminError, BrokerUnreachableError, PermissionDeniedError
from delaylevel.model.formatting import format_duration

from .context import ClusterContext
from .finding import Outcome, Problem

# Brokers before this were not tried, and say less of missing topics.
_OLDEST = (3, 0)
_KNOCK_S = 5.0
_SKEW_MS = 5000


def broker(cluster: ClusterContext) -> Outcome:
    """Both addresses answer, and the version is one that this release was made for."""
    problems = []
    connection, version = cluster.connection, ""
    try:
        version = cluster.admin.version()
    except BrokerUnreachableError as error:
        problems.append(Problem(str(error), "start the broker, or name its --admin-url"))
    except PermissionDeniedError:
        version = "unknown"  # said by the next check
    refusal = _knock(connection.service_url)
    if refusal:
        problems.append(
            Problem(
                f"nothing answers at {connection.service_url}: {refusal}",
                "start the broker, or name its --service-url",
            )
        )
    if version and version != "unknown" and _number(version) < _OLDEST:
        problems.append(
            Problem(
                f"the broker is Pulsar {version}",
                "upgrade to 4.0; nothing before 3.0 was tried with this release",
            )
        )
    return Outcome.of(*problems, note=f"Pulsar {version} at {connection.service_url}")


def rights(cluster: ClusterContext, namespace: str) -> Outcome:
    """The token may do what producers, movers and operators ask for."""
    problems = []
    for what, ask in (
        ("read the policies of", lambda: cluster.admin.namespace_policies(namespace)),
        ("list the topics of", lambda: cluster.admin.list_partitioned_topics(namespace)),
    ):
        try:
            ask()
        except PermissionDeniedError as error:
            problems.append(
                Problem(
                    f"the token may not {what} {namespace} ({error.status}: {error.reason})",
                    "give its role the tenant's admin rights (`pulsar-admin tenants update "
                    "--admin-roles`), or use the token of one that has them",
                )
            )
        except AdminError as error:
            problems.append(
                Problem(
                    f"cannot {what} {namespace}: {error.reason or error}",
                    f"does it exist? `pulsar-admin namespaces create {namespace}`",
                )
            )
    note = ""
    if cluster.configuration is None:
        note = "no superuser: checks of the broker's own settings are left out"
    return Outcome.of(*problems, note=note)


def clock(cluster: ClusterContext) -> Outcome:
    """The clocks of this machine and of the broker agree within some seconds."""
    before_ms = cluster.clock.now_ms()
    said_ms = cluster.admin.clock_ms()
    after_ms = cluster.clock.now_ms()
    if said_ms is None:
        return Outcome.skip("the broker does not say what time it is")
    # The broker's time has whole seconds, and was that of some moment in between.
    skew_ms = min(0, said_ms + 999 - before_ms) or max(0, said_ms - after_ms)
    if abs(skew_ms) <= _SKEW_MS:
        return Outcome.of(note="this machine and the broker agree")
    which = "behind" if skew_ms > 0 else "ahead of"
    return Outcome.of(
        Problem(
            f"this machine's clock is {format_duration(abs(skew_ms))} {which} the broker's",
            "set both by NTP (chrony): due times are the producer's own, and the broker releases "
            "by its clock",
        )
    )


def _knock(service_url: str) -> str:
    secure = service_url.startswith("pulsar+ssl")
    refusal = "no host is named"
    for host in service_url.partition("://")[2].split("/")[0].split(","):
        try:
            parts = urlsplit(f"//{host.strip()}")
            port = parts.port or (6651 if secure else 6650)
            with socket.create_connection((parts.hostname or "", port), _KNOCK_S):
                return ""
        except ValueError:
            refusal = "it is no host and port"
        except OSError as error:
            refusal = error.strerror or str(error)
    return refusal


def _number(version: str) -> tuple[int, int]:
    parts = version.split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (IndexError, ValueError):
        return _OLDEST  # a version of somebody's own making
