"""Preconditions of the documentation pages, and checks of their output.

``expected``   `Expected`, by the title of a page; `commands levels` has the examples in their help
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import urllib3

from delaylevel import DelayLevelClient, topics
from delaylevel.broker.process import free_ports
from delaylevel.cluster.rest.admin import Admin
from delaylevel.consumer.message import ReceivedMessage
from delaylevel.consumer.retry import Failure
from delaylevel.consumer.retry_publisher import RetryPublisher
from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import Mover
from delaylevel.mover.local import LocalMover
from support.loading import load
from support.world import QUIET, quiet_client

Step = str | Callable[[Any], None]  # a command line, or an action for the reader

DAY_MS = 86_400_000


class Expected(NamedTuple):
    """Preconditions and expectations for pages that need them.

    Attributes:
        before: the steps to do before a command, by page and command (without its comment); the
            command "" stands for the page.
        exits: the exit codes of commands of the help that do not exit with 0.
        own_broker: the pages that start a broker themselves.
    """

    before: Mapping[str, Mapping[str, Sequence[Step]]]
    exits: Mapping[str, int]
    own_broker: frozenset[str]


def _deduplicated(reader: Any) -> None:
    """Turn on the broker's deduplication in the namespace."""
    url = f"{reader.connection.admin_url}/admin/v2/namespaces/public/default/deduplication"
    assert urllib3.request("POST", url, timeout=60, json=True).status == 204


def _nothing(reader: Any) -> None:
    """Delete everything that earlier steps created."""
    reader.empty()


def _sent(count: int) -> Step:
    """Return a step that sends ``orders.jsonl`` to ``orders``: messages due in three days."""

    def send(reader: Any) -> None:
        line = json.dumps({"body": "pay me", "after": "3d"})
        (reader.folder / "orders.jsonl").write_text(f"{line}\n" * count, encoding="utf-8")
        reader.type("delaylevel send orders --jsonl orders.jsonl")

    return send


def _files(reader: Any) -> None:
    (reader.folder / "body.bin").write_bytes(bytes(100))
    line = json.dumps({"body": "pay me", "after": "2h", "key": "customer-7"})
    (reader.folder / "reminders.jsonl").write_text(f"{line}\n" * 3, encoding="utf-8")


def _reminded(reader: Any) -> None:
    """Send 120 reminders."""
    line = json.dumps({"body": "pay me", "after": "3d", "properties": {"kind": "reminder"}})
    (reader.folder / "many.jsonl").write_text(f"{line}\n" * 120, encoding="utf-8")
    reader.type("delaylevel send orders --jsonl many.jsonl")


def _identified(reader: Any) -> None:
    """Replace the ID in an example with the ID of an existing message."""
    first = json.loads(reader.type("delaylevel pending list orders -o jsonl").splitlines()[0])
    reader.words["public/default/_orders-delay-level-partition-3:12:7:0"] = first["id"]


class _Later(SystemClock):
    """The clock of a mover two days from now."""

    def now_ms(self) -> int:
        return super().now_ms() + 2 * DAY_MS


def _dead(*wrong: str) -> Step:
    """Return a step that creates dead letters of ``orders``.

    The IDs in the examples are replaced with those of the first and the last dead letter.

    Args:
        wrong: the fault of each message: ``due`` for a missing due time, or the name of a target
            that the level topic does not have.
    """

    def bury(reader: Any) -> None:
        client = quiet_client(reader.connection)
        producer = client.create_producer("_orders-delay-level-partition-0", batching_enabled=False)
        due = str(SystemClock().now_ms() + 3 * DAY_MS)
        for name in wrong:
            target = "orders" if name == "due" else name
            properties = {"delaylevel.target": f"persistent://public/default/{target}"}
            producer.send(b"x", properties | ({} if name == "due" else {"delaylevel.due": due}))
        producer.close()
        with Admin.from_connection(reader.connection) as admin:
            mover = LocalMover(client, admin, topics.describe(admin, "orders"), _Later())
            assert sum(mover.run_once().dead.values()) == len(wrong)
            mover.close()
        client.close()
        listed = reader.type("delaylevel dlq list orders -o jsonl").splitlines()
        first, *_, last = (json.loads(line)["id"] for line in listed)
        reader.words |= {"12:0:-1": first, "12:0:3": first, "12:1:-1": last}

    return bury


def _failed(reader: Any) -> None:
    """Let subscription ``billing`` of ``orders`` fail to handle a message."""
    with (
        DelayLevelClient.from_connection(reader.connection, logger=QUIET) as client,
        contextlib.closing(RetryPublisher(client, "orders", "billing")) as publisher,
    ):
        consumer = client.subscribe("orders", "billing")
        client.create_producer("orders").send(b"pay me")
        message = ReceivedMessage(consumer.receive(30_000), "orders", "billing", 0)
        publisher.bury(message, Failure(None, "only EUR"))


def _for_a_function(reader: Any) -> None:
    """Recreate the level topic of ``orders`` for a Function, unless it already is for one."""
    with Admin.from_connection(reader.connection) as admin:
        moved_by = topics.describe(admin, "orders").mover
    if moved_by is not Mover.FUNCTION:
        reader.stop()
        reader.empty()
        reader.type("delaylevel levels create orders --max-delay 5d --mover function")


def _function_runs(reader: Any) -> None:
    """Wait until the Function runs; its worker needs some seconds to start it."""
    reader.type_until_done("delaylevel mover status orders")


def _closed_accounts(reader: Any) -> None:
    """Write the table that the steps in docs/spark.md read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (reader.folder / "data").mkdir()
    table = pa.table({"account": ["customer-7"]})
    pq.write_table(table, reader.folder / "data/closed_accounts")


def _own_steps(reader: Any) -> None:
    """Write ``billing/steps.py`` from docs/spark.md."""
    _closed_accounts(reader)
    reader.python(reader.block("docs/spark.md", "# billing/steps.py"))


def _application(reader: Any) -> None:
    """Write ``shop/billing.py``, an application with a listener."""
    path = reader.folder / "shop" / "billing.py"
    path.parent.mkdir()
    path.write_text(
        "from delaylevel.consumer import Listeners\n\napp = Listeners.from_config()\n\n"
        "@app.on('orders', subscription='billing')\ndef bill(message):\n    print(message.value)\n"
    )


def _cluster(reader: Any) -> None:
    """Start a Spark master and worker, and name a file system that both can reach."""
    port, web = free_ports(2)
    master = f"spark://127.0.0.1:{port}"
    start = "spark-class org.apache.spark.deploy"
    reader.serve(f"{start}.master.Master --host 127.0.0.1 --port {port} --webui-port {web}")
    reader.serve(
        f"{start}.worker.Worker --host 127.0.0.1 --cores 1 --webui-port 0 --memory 1500m {master}"
    )
    reader.words |= {"spark://spark.example:7077": master, "hdfs://": f"file://{reader.folder}"}


def _acting(reader: Any) -> None:
    """Start a service with the token of actions, and send the messages that they name."""
    (port,) = free_ports(1)
    token = secrets.token_hex(16)
    reader.do(f"{BRIEF[0]} --target invoices", ACTED)
    reader.serve(f"env DELAYLEVEL_ACTION_TOKEN={token} delaylevel run orders --metrics-port {port}")
    reader.words |= {
        "http://127.0.0.1:9109": f"http://127.0.0.1:{port}",
        "TOKEN=…": f"TOKEN={token}",
        # The answers are shown, and any but a success ends the page.
        "curl -H": "curl --silent --show-error --fail-with-body -H",
        "receipt=dl1.eyJk…": "id=renewal-4712",
    }
    reader.type_until_done(f"curl -sf http://127.0.0.1:{port}/readyz")


def _secured(reader: Any) -> None:
    """Start a broker with tokens and TLS, and write an administrator's client.conf."""
    module = load("tests/integration/night/secured/conftest.py", "secured")
    secured = module.Secured(reader.folder)
    reader.stack.callback(secured.broker.remove)
    secured.broker.start()
    reader.words |= {
        "pulsar+ssl://broker.example:6651": secured.service_url,
        "https://broker.example:8443": secured.admin_url,
        "/run/secrets/delaylevel.token": str(secured.own_token_file),
        "/etc/ssl/broker-ca.pem": str(secured.certificate),
    }
    (reader.folder / "client.conf").write_text(
        f"webServiceUrl={secured.admin_url}\ntlsTrustCertsFilePath={secured.certificate}\n"
        "authPlugin=org.apache.pulsar.client.impl.auth.AuthenticationToken\n"
        f"authParams=file://{secured.own_token_file}\n"
    )
    words = shlex.join([*secured.words(), "--token-file", str(secured.own_token_file)])
    reader.type(f"delaylevel {words} levels create orders --max-delay 5d")


CREATED = ("delaylevel levels create orders",)
BRIEF = ("delaylevel levels create orders --max-delay 5d",)
BOTH = (*BRIEF, "delaylevel levels create invoices --max-delay 5d")
WITH_HOURS = (_nothing, "delaylevel levels create orders --then hour:24h")
# One entry for each message: a producer for a Function does not batch.
UNBATCHED = "delaylevel levels create orders --max-delay 5d --mover function"
PENDING = (
    *BRIEF,
    "delaylevel send orders 'pay me' --after 90m --key customer-7 --property customer=acme "
    "--property kind=invoice --property amount=12 --property invoice=2030-117",
    "delaylevel send orders 'pay me' --after 3d --property customer=initech",
)
CANCELLABLE = (
    _nothing,
    _files,
    "delaylevel levels create orders --overflow recirculate",
    "delaylevel send orders 'renew' --after 3d --id renewal-4711",
    "delaylevel send orders --jsonl reminders.jsonl",
)
ACTED = (
    "delaylevel send orders 'renew' --after 3d --id renewal-4711 --key 'customer 7' && "
    "delaylevel send orders 'renew' --after 3d --id renewal-4712"
)

EXPECTED = Expected(
    before={
        "commands levels": {
            line: steps
            for lines, steps in {
                (
                    "delaylevel levels create orders",
                    "delaylevel levels create orders --unit day --max-delay 30d --then hour:24h",
                ): (_nothing,),
                ("delaylevel levels delete orders",): (_nothing, *BRIEF),
                ("delaylevel levels delete orders --discard 120",): (UNBATCHED, _sent(120)),
                (
                    "delaylevel levels describe orders",
                    "delaylevel levels drain orders",
                ): (_nothing, *PENDING),
                ("delaylevel levels expand orders --max-delay 60d",): WITH_HOURS,
            }.items()
            for line in lines
        },
        "commands send": {"": ("delaylevel levels create orders --overflow recirculate", _files)},
        "commands run": {"": BOTH},
        "commands listen": {"": (_application,)},
        "commands mover run": {"": (*BOTH, _own_steps, _cluster)},
        "commands dispatcher": {
            "": BOTH,
            "delaylevel dispatcher run orders --delivery effectively-once --memory 1024": (
                _deduplicated,
            ),
        },
        "commands doctor": {"delaylevel doctor orders": BRIEF},
        "commands dlq": {
            "": (f"{BRIEF[0]} --target invoices", _dead("due", "elsewhere")),
            "delaylevel dlq discard orders --all --count 12": (_dead(*["due"] * 11),),
            "delaylevel dlq discard orders 12:0:-1 12:1:-1 --count 2": (_dead("due", "due"),),
            (
                "delaylevel dlq replay orders 12:0:-1 "
                "--new-target persistent://public/default/invoices"
            ): (_nothing, f"{BRIEF[0]} --target invoices", _dead("elsewhere", "due")),
            "delaylevel dlq replay orders --all": (
                _nothing,
                *BRIEF,
                _dead("invoices", "due"),
                f"{BRIEF[0]} --target invoices",
                _dead("due", "due", "elsewhere"),
            ),
            "delaylevel dlq show orders 12:0:-1": (_dead("due", "due"),),
            "delaylevel dlq list orders --subscription billing": (_failed,),
            "delaylevel dlq replay orders --subscription billing --all": (_failed,),
        },
        "commands horizon": {"": PENDING},
        "commands pending": {
            "": PENDING,
            (
                "delaylevel pending list orders "
                "--id public/default/_orders-delay-level-partition-3:12:7:0"
            ): (_nothing, *PENDING, _identified),
            **dict.fromkeys(
                (
                    "delaylevel pending cancel orders --key customer-7 --count 3",
                    "delaylevel pending cancel orders --key customer-7 --count 3 --timeout 1s",
                    "delaylevel pending cancel orders --id renewal-4711",
                    "delaylevel pending fire orders --key customer-7 --count 3 --timeout 1s",
                    "delaylevel pending fire orders --id renewal-4711",
                    "delaylevel pending outcome orders",
                    "delaylevel pending reschedule orders --key customer-7 --count 3 "
                    "--at 2030-01-31T12:00:00Z",
                    "delaylevel pending reschedule orders --id renewal-4711 --at +2d",
                ),
                CANCELLABLE,
            ),
            (
                "delaylevel pending cancel orders "
                "--where \"properties['kind'] = 'reminder'\" --count 120"
            ): (*CANCELLABLE, _reminded),
        },
        "docs/dispatcher.md": {
            "": BRIEF,
            "delaylevel dispatcher run orders --delivery effectively-once": (_deduplicated,),
        },
        "commands broker": {
            "delaylevel broker start --broker-conf brokerDeduplicationEnabled=true": (
                "delaylevel broker stop",
            ),
        },
        "commands mover": {
            "": BOTH,
            "delaylevel mover deploy orders": (_for_a_function,),
            "delaylevel mover status orders": (_function_runs,),
            "delaylevel mover delete orders": ("delaylevel mover deploy orders",),
            "delaylevel mover logs orders": ("delaylevel mover deploy orders", _function_runs),
        },
        "docs/consuming.md": {
            "delaylevel dlq list orders --subscription billing": (_failed,),
            (
                "delaylevel dlq discard orders --subscription billing --reason 'only EUR' --count 1"
            ): (_failed,),
        },
        "docs/functions.md": {
            "delaylevel mover status orders": (_function_runs,),
        },
        "docs/http.md": {"": (_acting,)},
        "docs/inspect.md": {"": PENDING},
        "docs/lifecycle.md": {
            "delaylevel levels set orders --on-missing-target dead-letter": CREATED,
            "delaylevel levels expand orders --max-delay 60d --then hour:48h": WITH_HOURS,
            "delaylevel levels drain orders": (_nothing, *PENDING),
            "delaylevel levels delete orders": (_nothing, *BRIEF),
            "delaylevel levels delete orders --discard 120": (UNBATCHED, _sent(120)),
            "delaylevel dlq list orders": (*CREATED, _dead(*["due"] * 13, "invoices")),
        },
        "docs/security.md": {"": (_secured,)},
        "docs/spark.md": {"": (*BOTH, _closed_accounts, _cluster)},
    },
    exits={
        "delaylevel doctor orders": 1,  # no mover runs
        "delaylevel doctor orders --all": 1,
        "delaylevel pending outcome orders --id renewal-4711 -o json": 1,  # no dispatcher runs
        "delaylevel doctor orders --delivery effectively-once": 1,
        "delaylevel dlq replay orders --all": 1,  # some cannot be read
    },
    own_broker=frozenset({"commands", "commands broker", "commands demo"}),
)


@pytest.fixture(scope="session")
def expected() -> Expected:
    """Preconditions and expectations, by page."""
    return EXPECTED
