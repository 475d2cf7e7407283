"""Preconditions of the documentation pages, which `BEFORE` has by page and command."""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import urllib3

from delaylevel import DelayLevelClient, topics
from delaylevel.broker.process import free_ports
from delaylevel.cluster.rest.admin import Admin
from delaylevel.consumer.message import ReceivedMessage
from delaylevel.consumer.retry import Decision
from delaylevel.consumer.retry_publisher import RetryPublisher
from delaylevel.model.clock import SystemClock
from delaylevel.mover.local import LocalMover
from support.loading import load
from support.world import QUIET, quiet_client

Step = str | Callable[[Any], None]  # a command line, or an action for the reader

DAY_MS = 86_400_000


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


class _Later(SystemClock):
    """The clock of a mover two days from now."""

    def now_ms(self) -> int:
        return super().now_ms() + 2 * DAY_MS


def _dead(reader: Any) -> None:
    """Create dead letters of ``orders``: 13 without a due time, and one for another target.

    The ID in the examples is replaced with that of the first one.
    """
    client = quiet_client(reader.connection)
    producer = client.create_producer("_orders-delay-level-partition-0", batching_enabled=False)
    to, due = "persistent://public/default/", str(SystemClock().now_ms() + 3 * DAY_MS)
    for _ in range(13):
        producer.send(b"x", {"delaylevel.target": f"{to}orders"})
    producer.send(b"x", {"delaylevel.target": f"{to}invoices", "delaylevel.due": due})
    producer.close()
    with Admin.from_connection(reader.connection) as admin:
        mover = LocalMover(client, admin, topics.describe(admin, "orders"), _Later())
        assert sum(mover.run_once().dead.values()) == 14
        mover.close()
    client.close()
    first, *_ = reader.type("delaylevel dlq list orders -o jsonl").splitlines()
    reader.words["12:0:3"] = json.loads(first)["id"]


def _failed(reader: Any) -> None:
    """Let subscription ``billing`` of ``orders`` fail to handle a message."""
    with (
        DelayLevelClient.from_connection(reader.connection, logger=QUIET) as client,
        contextlib.closing(RetryPublisher(client, "orders", "billing")) as publisher,
    ):
        consumer = client.subscribe("orders", "billing")
        client.create_producer("orders").send(b"pay me")
        message = ReceivedMessage(consumer.receive(30_000), "orders", "billing", 0)
        publisher.bury(message, Decision(None, "only EUR"))


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
ACTED = (
    "delaylevel send orders 'renew' --after 3d --id renewal-4711 --key 'customer 7' && "
    "delaylevel send orders 'renew' --after 3d --id renewal-4712"
)

#: The steps to do before a command (without its comment), by page; "" stands for the whole page.
BEFORE: Mapping[str, Mapping[str, Sequence[Step]]] = {
    "docs/dispatcher.md": {
        "": BRIEF,
        "delaylevel dispatcher run orders --delivery effectively-once": (_deduplicated,),
    },
    "docs/consuming.md": {
        "delaylevel dlq list orders --subscription billing": (_failed,),
        "delaylevel dlq discard orders --subscription billing --reason 'only EUR' --count 1": (
            _failed,
        ),
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
        "delaylevel dlq list orders": (*CREATED, _dead),
    },
    "docs/security.md": {"": (_secured,)},
    "docs/spark.md": {"": (*BOTH, _closed_accounts, _cluster)},
}
