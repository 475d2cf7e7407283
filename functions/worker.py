"""Client of the functions worker's REST interface, for one Function."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from urllib3.filepost import encode_multipart_formdata

from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rest.http import Rest, encoded, options_of
from delaylevel.errors import AdminError, LevelTopicError, NotFoundError

_API = "v3"
_TRIES = 20
_PAUSE_S = 0.25


class FunctionsWorker:
    """Functions of one cluster: registration, status and removal."""

    def __init__(self, connection: Connection) -> None:
        options = options_of(connection)
        options["timeout_s"] = 120
        self._rest = Rest(connection.admin_url, **options)

    def __enter__(self) -> FunctionsWorker:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._rest.close()

    def config(self, function: str) -> dict[str, Any] | None:
        """Return a function's configuration; None if it is not registered."""
        try:
            return dict(self._get(function))
        except NotFoundError:
            return None

    def register(
        self, function: str, config: Mapping[str, Any], package: bytes, *, update: bool
    ) -> None:
        """Register a function and start it; or replace it, and its instances restart."""
        body, kind = encode_multipart_formdata(
            {
                "functionConfig": ("functionConfig", json.dumps(config), "application/json"),
                "data": (config["py"], package, "application/octet-stream"),
            }
        )
        for attempt in range(_TRIES):
            try:
                self._request("PUT" if update else "POST", function, data=body, kind=kind)
                return
            except AdminError as error:
                # A worker that stores packages in the cluster's package management (a standalone
                # broker does) does not delete them with the function in 4.0.8, and then refuses
                # every new function of that name.
                # Never at an update: it would be the package of a function that runs.
                is_left = not update and "metadata already exists" in error.reason
                if not is_left or attempt == _TRIES - 1:
                    raise
            self._delete_packages(function)
            time.sleep(_PAUSE_S)

    def status(self, function: str) -> dict[str, Any]:
        """Return the worker's status of the instances."""
        return dict(self._get(f"{function}/status"))

    def delete(self, function: str) -> None:
        """Remove a function; cleanupSubscription decides whether its subscriptions stay."""
        self._request("DELETE", function)
        self._delete_packages(function)

    def _delete_packages(self, function: str) -> None:
        """Delete the packages of a function that is not registered, as far as possible."""
        path = f"packages/function/{encoded(function)}"
        with contextlib.suppress(AdminError):
            for version in self._rest.request("GET", path, api=_API).json():
                with contextlib.suppress(AdminError):  # a half-written package stays
                    self._rest.request("DELETE", f"{path}/{quote(version, safe='')}", api=_API)

    def _get(self, path: str) -> Any:
        return json.loads(self._request("GET", path).data)

    def _request(self, method: str, path: str, **options: Any) -> Any:
        try:
            return self._rest.request(method, f"functions/{encoded(path)}", api=_API, **options)
        except AdminError as error:
            is_off = "not enabled" in error.reason  # a standalone broker
            if is_off or (error.status in (404, 405) and "unction" not in error.reason):
                raise LevelTopicError(
                    "this cluster has no functions worker: start brokers with "
                    "functionsWorkerEnabled=true (`delaylevel broker start --functions` for the "
                    "embedded one) and `delaylevel[functions]` in their Python, or create a level "
                    "topic with --mover service, for `delaylevel run`"
                ) from error
            raise
