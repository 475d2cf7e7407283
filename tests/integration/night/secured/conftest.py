"""A broker with tokens and TLS, on which every role has only the rights it needs.

The rights are those that docs/security.md grants. The ``BROKER`` of a test module has further
settings of its broker.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pulsar
import pytest

from delaylevel import topics
from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.broker.process import free_ports
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rest.admin import Admin
from delaylevel.dispatcher import Dispatcher, DispatchSettings
from delaylevel.errors import PrerequisiteError
from delaylevel.model.level_topic import LevelTopicDescription, Role
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.producer.client import DelayLevelClient
from delaylevel.testing.embedded import start_or_skip
from delaylevel.topics.status import LevelTopicStatus, status
from support.background import Serving
from support.pages import ROOT
from support.tokens import RenewedFile, jwt, token_conf
from support.world import QUIET

UNIT = timedelta(milliseconds=500)
LIFETIME_S = 20
BRIEF = Levels(PartitionStrategy(partition_by=UNIT, maximum_delay=4 * UNIT))

# The roles of the tests, by the rows of the table in docs/security.md.
ROWS = {
    "producer": "sender",
    "producer that waits for outcomes": "waiting",
    "mover: `mover run`, Spark job, Function": "mover",
    "dispatcher": "dispatcher",
    "`delaylevel run`: both": "runner",
    "consumer": "application",
    "listener with retries": "listener",
    "commands that look: `pending list`, `horizon`": "looking",
    "commands that act: `pending cancel`, `reschedule`, `fire`": "acting",
    "operator of the Function: `mover deploy`, `status`, `delete`": "deployer",
}
# Its columns; None is the business topic.
COLUMNS = (
    None,
    Role.LEVEL,
    Role.HELD,
    Role.DEAD_LETTER,
    Role.WINDOW,
    Role.JOURNAL,
    Role.OUTCOMES,
)


def documented() -> dict[str, dict[Role | None, str]]:
    """Return the grants of docs/security.md to each role, with the final window ``tracker``."""
    text = (ROOT / "docs" / "security.md").read_text()
    table = text[text.index("| process | business topic |") :].split("\n\n")[0].splitlines()
    grants = {}
    for line in table[2:]:
        title, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        granted = zip(COLUMNS, cells, strict=True)
        grants[ROWS[title]] = {what: actions for what, actions in granted if actions}
    assert grants.keys() == set(ROWS.values())
    return grants


class Secured:
    """A broker with token authentication, and TLS ports in addition to the plain ones."""

    def __init__(self, folder: Path, functions: bool = False, **settings: Any) -> None:
        openssl = shutil.which("openssl")
        if openssl is None:
            raise PrerequisiteError("openssl is needed to make a certificate: install it")
        self.folder = folder
        self.certificate, key = folder / "cert.pem", folder / "key.pem"
        # A worker inside a standalone broker connects to its own broker as localhost.
        names = "IP:127.0.0.1,DNS:localhost" if functions else "IP:127.0.0.1"
        subprocess.run(
            f"{openssl} req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=broker "
            f"-addext subjectAltName={names} -keyout {key} -out {self.certificate}".split(),
            check=True,
            capture_output=True,
        )
        self.token_of, tokens = token_conf(folder)
        self.token = self.token_of("admin")
        self.foreign_token = jwt(secrets.token_bytes(32), "admin")
        self.own_token_file = folder / "broker.token"
        service_port, web_port = free_ports(2)
        self.service_url = f"pulsar+ssl://127.0.0.1:{service_port}"
        self.admin_url = f"https://127.0.0.1:{web_port}"
        conf: dict[str, Any] = {
            "defaultRetentionTimeInMinutes": 60,
            "defaultRetentionSizeInMB": -1,
            # It checks for expired tokens every second instead of every minute.
            "authenticationRefreshCheckSeconds": 1,
            **tokens,
            "brokerServicePortTls": service_port,
            "webServicePortTls": web_port,
            "tlsCertificateFilePath": self.certificate,
            "tlsKeyFilePath": key,
        }

        def filled(value: Any) -> Any:
            words = {"certificate": self.certificate, "token": self.token}
            return value.format(**words) if isinstance(value, str) else value

        self.broker = EmbeddedBroker(
            folder / "broker",
            conf={**conf, **{name: filled(value) for name, value in settings.items()}},
            functions=functions,
            heap_mb=256,
            token=self.token,
            follow_parent=True,
        )

    def load(self, **settings: Any) -> Connection:
        """Return a connection to the TLS addresses that trusts the certificate."""
        addresses = {"service_url": self.service_url, "admin_url": self.admin_url}
        trust = {"tls_trust_certs_file": self.certificate, "operation_timeout_seconds": 60}
        return Connection.load(environ={}, **{**addresses, **trust, **settings})

    def words(self) -> list[str]:
        """Return the options with which a program reaches the broker, without a token."""
        found = ["--service-url", self.service_url, "--admin-url", self.admin_url]
        return [*found, "--tls-trust-certs-file", str(self.certificate)]


@pytest.fixture(scope="module")
def secured(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Secured]:
    settings = getattr(request.module, "BROKER", {})
    try:
        made = Secured(tmp_path_factory.mktemp("secured"), **settings)
    except PrerequisiteError as error:
        pytest.skip(str(error))
    try:
        start_or_skip(made.broker)
        yield made
    finally:
        made.broker.remove()


@pytest.fixture
def connection(secured: Secured) -> Connection:
    """The secured broker instead of the plain one, for the fixtures of other tests; no token."""
    return secured.load()


@dataclass(frozen=True)
class Roles:
    """A level topic, and a token for each role that works on it."""

    secured: Secured
    description: LevelTopicDescription
    documented: dict[str, dict[Role | None, str]]

    @property
    def target(self) -> str:
        return self.description.targets[0]

    def load(self, role: str, **settings: Any) -> Connection:
        given = {"token": self.secured.token_of(role), "operation_timeout_seconds": 5, **settings}
        return self.secured.load(**given)

    def client(self, role: str, **settings: Any) -> DelayLevelClient:
        return DelayLevelClient.from_connection(self.load(role, **settings), logger=QUIET)

    def admin(self, role: str) -> Admin:
        return Admin.from_connection(self.load(role))

    @contextlib.contextmanager
    def owner(self) -> Iterator[Admin]:
        """Open an admin client that has all rights."""
        with Admin.from_connection(self.secured.load(token=self.secured.token)) as admin:
            yield admin

    @contextlib.contextmanager
    def clients(self, *roles: str) -> Iterator[list[DelayLevelClient]]:
        with contextlib.ExitStack() as stack:
            yield [stack.enter_context(contextlib.closing(self.client(role))) for role in roles]

    @contextlib.contextmanager
    def dispatching(self, folder: Path) -> Iterator[None]:
        settings = DispatchSettings(directory=folder / "spill")
        with (
            self.clients("dispatcher") as (client,),
            self.admin("dispatcher") as admin,
            Serving(Dispatcher(client, admin, [self.description.topic], settings)),
        ):
            yield

    def status(self) -> LevelTopicStatus:
        """Return the present state of the level topic, as the owner of everything sees it."""
        with self.owner() as owner:
            return status(owner, self.description, 0)

    def grant(self, *names: str) -> None:
        """Grant each role what docs/security.md grants it."""
        for name in names:
            self.grant_actions(name, self.documented[name])

    def grant_actions(self, role: str, roles: Mapping[Role | None, str]) -> None:
        """Grant actions on member topics, by their role; None is the target."""
        with self.owner() as owner:
            for member in self.description.members():
                if member.role in roles:
                    self.grant_on(owner, member.topic, role, roles[member.role])
            if None in roles:
                self.grant_on(owner, TopicName.parse(self.target), role, roles[None])

    @staticmethod
    def grant_on(owner: Admin, topic: TopicName, role: str, actions: str) -> None:
        owner._rest.post(f"{topic.rest_path}/permissions/{role}", actions.split(", "))


@pytest.fixture
def make_roles(secured: Secured) -> Callable[..., Roles]:
    """``make_roles(**description)``: a level topic whose roles have no rights yet."""

    def make(levels: Levels = BRIEF, **values: Any) -> Roles:
        target = f"persistent://public/default/guarded-{secrets.token_hex(4)}"
        description = LevelTopicDescription(f"{target}-delay-level", levels, (target,), **values)
        with Admin.from_connection(secured.load(token=secured.token)) as admin:
            admin.create_partitioned(TopicName.parse(target), 1)
            return Roles(secured, topics.create(admin, description), documented())

    return make


@pytest.fixture
def roles(make_roles: Callable[..., Roles]) -> Roles:
    """A level topic whose roles have exactly the rights in docs/security.md."""
    made = make_roles()
    made.grant(*made.documented)
    return made


class Consumer:
    """A consumer that collects the IDs of messages at a business topic, by body."""

    def __init__(self, client: Any, target: str) -> None:
        self._consumer = client.subscribe(target, "app")
        self.ids: dict[bytes, set[str]] = {}

    def has(self, *bodies: bytes) -> bool:
        """Receive the available messages; return True if all these bodies have arrived by now."""
        with contextlib.suppress(pulsar.Timeout):
            while True:
                message = self._consumer.receive(timeout_millis=100)
                identity = message.properties().get("delaylevel.id", "")
                self.ids.setdefault(message.data(), set()).add(identity)
                self._consumer.acknowledge(message)
        return set(bodies) <= self.ids.keys()


class Renewed(RenewedFile):
    """A token file that is renewed every second, until a test lets the token expire."""

    def __init__(self, secured: Secured, role: str, path: Path) -> None:
        super().__init__(path, functools.partial(secured.token_of, role, LIFETIME_S))
        self._foreign = secured.foreign_token

    def empty(self) -> None:
        self.lapse()
        self.path.write_text("")

    def remove(self) -> None:
        self.lapse()
        self.path.unlink()

    def spoil(self) -> None:
        """Write another cluster's token to the file."""
        self.lapse()
        self.write(self._foreign)


@pytest.fixture
def arrivals() -> Callable[[Any, str], Consumer]:
    """``arrivals(client, target)``: a consumer that collects IDs by body."""
    return Consumer


@pytest.fixture
def renewed() -> Iterator[Callable[[Secured, str, Path], Renewed]]:
    """``renewed(secured, role, path)``: a token file that is renewed, and can be broken."""
    with contextlib.ExitStack() as stack:

        def make(secured: Secured, role: str, path: Path) -> Renewed:
            made = Renewed(secured, role, path)
            stack.callback(made.lapse)
            return made

        yield make
