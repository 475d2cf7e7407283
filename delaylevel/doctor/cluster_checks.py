"""Checks of the cluster itself: its addresses, permissions and clock."""

from __future__ import annotations

from delaylevel.cluster.connection.settings import require_reachable
from delaylevel.errors import AdminError, BrokerUnreachableError, PermissionDeniedError
from delaylevel.model.formatting import format_duration

from .context import ClusterContext
from .finding import CheckResult, Problem

# Earlier brokers were not tested, and describe missing topics less precisely.
_OLDEST = (3, 0)
_SKEW_MS = 5000


def broker(cluster: ClusterContext) -> CheckResult:
    """Check that both addresses answer, and that this release supports the broker's version."""
    problems = []
    connection, version = cluster.connection, ""
    try:
        version = cluster.admin.version()
    except BrokerUnreachableError as error:
        problems.append(Problem(str(error), "start the broker, or name its --admin-url"))
    except PermissionDeniedError:
        version = "unknown"  # the next check reports it
    except AdminError as error:
        problems.append(Problem(str(error), "see the broker's own log, and try again"))
    try:
        require_reachable(connection)
    except BrokerUnreachableError as error:
        problems.append(Problem(str(error), "start the broker, or name its --service-url"))
    if version and version != "unknown" and _release(version) < _OLDEST:
        problems.append(
            Problem(
                f"the broker is Pulsar {version}",
                "upgrade to 4.0; this release was not tested with versions before 3.0",
            )
        )
    return CheckResult.of(problems, f"Pulsar {version} at {connection.service_url}")


def rights(cluster: ClusterContext, namespace: str) -> CheckResult:
    """Check that the token has the permissions of producers, movers and operators."""
    problems = []
    for action, request in (
        ("read the policies of", lambda: cluster.admin.namespace_policies(namespace)),
        ("list the topics of", lambda: cluster.admin.list_partitioned_topics(namespace)),
    ):
        try:
            request()
        except PermissionDeniedError as error:
            problems.append(
                Problem(
                    f"the token may not {action} {namespace} ({error.status}: {error.reason})",
                    "give its role the tenant's admin rights (`pulsar-admin tenants update "
                    "--admin-roles`), or use the token of a role that has them",
                )
            )
        except AdminError as error:
            problems.append(
                Problem(
                    f"cannot {action} {namespace}: {error.reason or error}",
                    f"create it if it does not exist: `pulsar-admin namespaces create {namespace}`",
                )
            )
    note = ""
    if cluster.configuration is None:
        note = "no superuser: checks of the broker's own settings are left out"
    return CheckResult.of(problems, note)


def clock(cluster: ClusterContext) -> CheckResult:
    """Check that the clocks of this machine and of the broker differ by a few seconds at most."""
    before_ms = cluster.clock.now_ms()
    broker_ms = cluster.admin.clock_ms()
    after_ms = cluster.clock.now_ms()
    if broker_ms is None:
        return CheckResult.skip("the broker does not report its time")
    # The broker reports whole seconds, of some moment between the two local times.
    skew_ms = min(0, broker_ms + 999 - before_ms) or max(0, broker_ms - after_ms)
    if abs(skew_ms) <= _SKEW_MS:
        return CheckResult(note="this machine and the broker agree")
    direction = "behind" if skew_ms > 0 else "ahead of"
    return CheckResult.failed(
        f"this machine's clock is {format_duration(abs(skew_ms))} {direction} the broker's",
        "synchronize both with NTP (chrony): due times come from the producer's clock, and the "
        "broker delivers by its own",
    )


def _release(version: str) -> tuple[int, int]:
    parts = version.split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (IndexError, ValueError):
        return _OLDEST  # a custom version, which cannot be judged
