"""Connection settings of a cluster: arguments, the environment, a file, and renewable tokens."""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import platformdirs
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, ValidationError

from delaylevel.cluster.logs import RepeatedWarning
from delaylevel.errors import BrokerUnreachableError, ConfigError

from . import local_brokers

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    import pulsar

log = logging.getLogger(__name__)

ENVIRONMENT_PREFIX = "DELAYLEVEL_"
#: The table of the file that is for applications with listeners.
TABLE = "listeners"


def read_config(
    config_file: str | os.PathLike[str] | None, environ: Mapping[str, str]
) -> tuple[Path, dict[str, Any]]:
    """Return the path of the configuration file, and its contents; empty if there is none."""
    chosen = config_file or environ.get(ENVIRONMENT_PREFIX + "CONFIG")
    path = Path(platformdirs.user_config_dir("delaylevel")) / "config.toml"
    if chosen:
        path = Path(chosen).expanduser()
    try:
        settings: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        if chosen or not isinstance(error, FileNotFoundError):
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        return path, {}
    except ValueError as error:  # TOML, or its encoding
        # Only the first line of the reason: later ones may quote the file, and so a secret.
        raise ConfigError(f"{path} is not TOML: {str(error).splitlines()[0]}") from None
    known = [*Connection.model_fields, f"[{TABLE}]"]
    unknown = sorted(settings.keys() - {*known, TABLE})
    if unknown:
        raise ConfigError(
            f"{path} has unknown settings: {', '.join(unknown)} (known: {', '.join(known)})"
        )
    return path, settings


def _explain(error: ValidationError, places: Mapping[str, str]) -> str:
    """Return the problems of settings in one line, without their values."""
    lines = []
    for detail in error.errors(include_input=False, include_url=False, include_context=False):
        name, text = str(detail["loc"][0]), str(detail["msg"]).removeprefix("Value error, ")
        lines.append(f"{name} (from {places.get(name, 'the defaults')}): {text}")
    return "; ".join(dict.fromkeys(lines))


def read_token_file(path: str | os.PathLike[str], name: str) -> str:
    """Return the token in a file; ``name`` stands for the file in error messages."""
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"{name} cannot be read: {reason}") from None
    if not token:
        raise ConfigError(f"{name} is empty")
    return token


class TokenSource:
    """Source of the current token, or of the previous one while the current one cannot be read."""

    def __init__(self, read: Callable[[], str | None]) -> None:
        self._read = read
        self._last = read() or ""
        self._warning = RepeatedWarning(log, "the token")

    def __call__(self) -> str:
        """Return the token; empty for none."""
        # A file that is being renewed may be empty or missing for a moment. The Pulsar client asks
        # in its own thread, where an exception would end the process.
        try:
            self._last = self._read() or ""
            self._warning.over()
        except Exception as error:
            self._warning.failed(f"{error}; using the previous one until it can be read")
        return self._last

    def for_client(self) -> pulsar.AuthenticationToken:
        """Return the ``authentication`` of a ``pulsar.Client`` that uses this source."""
        import pulsar

        authentication = pulsar.AuthenticationToken(self)
        # It is never freed (some hundred bytes). The client would free it in its own thread a
        # moment after `close()`; if the process ends in that moment, the thread requests the
        # interpreter lock too late, which aborts the process (SIGABRT) although all work is done.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(authentication.auth))
        return authentication


_CONNECT_TIMEOUT_S = 5.0


def _checked_url(value: str, schemes: tuple[str, ...]) -> str:
    scheme, _, rest = value.partition("://")
    if scheme not in schemes or not rest.strip("/"):
        raise ValueError(f"must look like {' or '.join(f'{s}://host:port' for s in schemes)}")
    if "@" in rest:
        raise ValueError("must not carry a user or password: use token, token_file or certificates")
    return value


_ServiceUrl = Annotated[
    str, AfterValidator(lambda url: _checked_url(url, ("pulsar", "pulsar+ssl")))
]
_AdminUrl = Annotated[
    str, AfterValidator(lambda url: _checked_url(url, ("http", "https")).rstrip("/"))
]
_PATHS = {"token_file", "tls_trust_certs_file", "tls_certificate_file", "tls_private_key_file"}


class Connection(BaseModel):
    """The addresses of a cluster, and the credentials for it.

    Parameters:
        service_url: ``pulsar://`` or ``pulsar+ssl://``, several hosts separated by commas.
        admin_url: address of the admin REST interface, ``http://`` or ``https://``, several hosts
            separated by commas. A request goes to the one that answered last; if it does not
            answer, to the next one.
        token: a token for both; kept out of ``repr``, logs and error texts.
        token_file: a file with the token, read again at every use, so that it can be renewed.
        tls_trust_certs_file: trusted certificates (PEM); by default those of ``certifi``.
        tls_certificate_file, tls_private_key_file: the client's own certificate and key (PEM).
        tls_allow_insecure: True to accept any certificate, whatever its issuer and name.
        tls_validate_hostname: True, the default, to compare the certificate's name with the host's.
        operation_timeout_seconds: timeout of the client's operations (create, subscribe, close).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    service_url: _ServiceUrl = "pulsar://localhost:6650"
    admin_url: _AdminUrl = "http://localhost:8080"
    token: SecretStr | None = None
    token_file: Path | None = None
    tls_trust_certs_file: Path | None = None
    tls_certificate_file: Path | None = None
    tls_private_key_file: Path | None = None
    tls_allow_insecure: bool = False
    tls_validate_hostname: bool = True
    operation_timeout_seconds: int = Field(default=30, ge=1)

    @classmethod
    def load(
        cls,
        *,
        service_url: str | None = None,
        admin_url: str | None = None,
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        tls_trust_certs_file: str | os.PathLike[str] | None = None,
        tls_certificate_file: str | os.PathLike[str] | None = None,
        tls_private_key_file: str | os.PathLike[str] | None = None,
        tls_allow_insecure: bool | None = None,
        tls_validate_hostname: bool | None = None,
        operation_timeout_seconds: int | None = None,
        config_file: str | os.PathLike[str] | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> Connection:
        """Collect the settings from arguments, environment and configuration file.

        An argument overrides an environment variable (``DELAYLEVEL_`` and the name in capitals),
        which overrides the configuration file (TOML; ``DELAYLEVEL_CONFIG``, or
        ``delaylevel/config.toml`` in the user's configuration directory). If only one address is
        set, the other is the same host at Pulsar's default port. Without any address, those of a
        running embedded broker are used, or else Pulsar's defaults. A token overrides a token file
        of a lower place, and vice versa.

        Returns:
            The connection; it has not contacted the cluster.

        Raises:
            ConfigError: a value or file is invalid; the text names its source, never a secret.
        """
        # The parameters that are settings, and not places to find them.
        arguments = {name: value for name, value in locals().items() if name in cls.model_fields}
        given = {name: value for name, value in arguments.items() if value is not None}
        from_environment = {
            name: environ[ENVIRONMENT_PREFIX + name.upper()]
            for name in arguments
            if environ.get(ENVIRONMENT_PREFIX + name.upper())
        }
        path, contents = read_config(config_file, environ)
        from_file = {name: value for name, value in contents.items() if name != TABLE}
        for name in from_file.keys() & _PATHS:  # they are relative to the file
            from_file[name] = path.parent / Path(str(from_file[name])).expanduser()

        values: dict[str, Any] = {}
        places: dict[str, str] = {}
        for settings, place in (
            (from_file, f"the file {path}"),
            (from_environment, "the environment"),
            (given, "the command line or call"),
        ):
            if {"token", "token_file"} <= settings.keys():
                raise ConfigError(f"{place} sets both token and token_file: keep one of them")
            if {"token", "token_file"} & settings.keys():
                values.pop("token", None)
                values.pop("token_file", None)
            values.update(settings)
            places.update(dict.fromkeys(settings, place))
        _complete_addresses(values)
        for name in values.keys() & _PATHS:
            values[name] = Path(values[name]).expanduser()
        try:
            connection = cls(**values)
        except ValidationError as error:
            raise ConfigError(_explain(error, places)) from None
        if (connection.tls_certificate_file is None) != (connection.tls_private_key_file is None):
            raise ConfigError(
                "tls_certificate_file and tls_private_key_file belong together: set both or neither"
            )
        for name in sorted(values.keys() & _PATHS):
            if not values[name].is_file():
                raise ConfigError(f"{name} (from {places[name]}): there is no file {values[name]}")
        return connection

    def read_token(self) -> str | None:
        """Return the current token, or None if none is configured.

        Raises:
            ConfigError: the token file cannot be read, or is empty.
        """
        if self.token is not None:
            return self.token.get_secret_value()
        if self.token_file is None:
            return None
        return read_token_file(self.token_file, f"token_file {self.token_file}")

    def client_kwargs(self) -> dict[str, Any]:
        """Return the arguments of ``pulsar.Client`` (or ``DelayLevelClient``) for this cluster.

        The client reads the token file whenever it needs the token. If it cannot be read then, the
        client uses the previous token.

        Raises:
            ConfigError: the token file cannot be read now, or is empty.
        """
        import pulsar

        kwargs: dict[str, Any] = {
            "service_url": self.service_url,
            "operation_timeout_seconds": self.operation_timeout_seconds,
            "tls_allow_insecure_connection": self.tls_allow_insecure,
            "tls_validate_hostname": self.tls_validate_hostname,
        }
        if self.tls_trust_certs_file is not None:
            kwargs["tls_trust_certs_file_path"] = str(self.tls_trust_certs_file)
        if self.tls_certificate_file is not None:
            kwargs["tls_certificate_file_path"] = str(self.tls_certificate_file)
            kwargs["tls_private_key_file_path"] = str(self.tls_private_key_file)
        if self.token is not None:
            kwargs["authentication"] = pulsar.AuthenticationToken(self.token.get_secret_value())
        elif self.token_file is not None:
            # A file that cannot be read now raises our error here, not one inside the client.
            kwargs["authentication"] = TokenSource(self.read_token).for_client()
        elif self.tls_certificate_file is not None:
            kwargs["authentication"] = pulsar.AuthenticationTLS(
                str(self.tls_certificate_file), str(self.tls_private_key_file)
            )
        return kwargs

    def open_client(self, **options: Any) -> Any:
        """Return a new ``pulsar.Client`` for this cluster; the caller closes it.

        Args:
            options: further arguments of ``pulsar.Client``; they override this connection's.

        Raises:
            ConfigError: the token file cannot be read now, or is empty.
        """
        import pulsar

        return pulsar.Client(**{**self.client_kwargs(), **options})

    def open_service_client(self, **options: Any) -> Any:
        """Return a new client for movers and dispatchers; the caller closes it.

        If several hosts are named, it is a
        :class:`~delaylevel.cluster.connection.failover_client.FailoverClient`, otherwise a
        ``pulsar.Client``.

        Args:
            options: as for `open_client`.

        Raises:
            ConfigError: as for `open_client`.
        """
        if "," not in self.service_url:
            return self.open_client(**options)
        from .failover_client import FailoverClient

        return FailoverClient(
            lambda url: self.open_client(**{**options, "service_url": url}), self.service_url
        )


def require_reachable(connection: Connection) -> None:
    """Connect to the service address, so that an absent broker is reported at once."""
    # The Pulsar client would try again until its operation timeout.
    secure = connection.service_url.startswith("pulsar+ssl")
    hosts = connection.service_url.partition("://")[2].split("/")[0].split(",")
    reason = "the address names no host"
    for host in hosts:
        try:
            parts = urlsplit(f"//{host.strip()}")
            port = parts.port or (6651 if secure else 6650)
            with socket.create_connection((parts.hostname or "", port), _CONNECT_TIMEOUT_S):
                return
        except ValueError:
            reason = "the address is not HOST:PORT"
        except OSError as error:
            reason = error.strerror or str(error)
    raise BrokerUnreachableError(f"no broker answers at {connection.service_url}: {reason}")


def _complete_addresses(values: dict[str, Any]) -> None:
    """Add the missing address, so that both are of the same cluster."""
    service, admin = values.get("service_url"), values.get("admin_url")
    if service and admin:
        return
    if service:
        host, secure = _host(service), str(service).startswith("pulsar+ssl")
        values["admin_url"] = f"https://{host}:8443" if secure else f"http://{host}:8080"
    elif admin:
        host, secure = _host(admin), str(admin).startswith("https")
        values["service_url"] = f"pulsar+ssl://{host}:6651" if secure else f"pulsar://{host}:6650"
    else:
        private = local_brokers.status_of(local_brokers.usual_directory())
        if private.running:
            values["service_url"], values["admin_url"] = private.service_url, private.admin_url


def _host(url: object) -> str:
    """Return the first host of an address, in brackets if it is an IPv6 address."""
    first = str(url).partition("://")[2].split(",")[0].split("/")[0]
    try:
        host = urlsplit(f"//{first}").hostname or "localhost"
    except ValueError:
        return "localhost"
    return f"[{host}]" if ":" in host else host
