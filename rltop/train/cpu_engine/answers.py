"""Bodies in and out: JSON as SGLang reads and writes it, and its three shapes of an error."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response


class BadRequest(Exception):
    """The body does not fit the endpoint."""


async def read_body(request: Request) -> dict[str, Any]:
    """The body as a JSON object; an absent one is empty. Raises `BadRequest`."""
    raw = await request.body()
    if not raw:
        return {}
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise BadRequest(f"JSON decode error: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def json_answer(content: Any, status: int = HTTPStatus.OK) -> Response:
    """JSON; NaN and infinities become null, as in SGLang."""
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")


def error_answer(status: int, message: str) -> Response:
    """A request that was understood and refused."""
    return json_answer({"error": {"message": message}}, status)


def error_object(status: int, message: str, kind: str) -> Response:
    """A body that does not fit its endpoint."""
    return json_answer(
        {"object": "error", "message": message, "type": kind, "param": None, "code": int(status)}, status
    )


async def unknown_path(request: Request, error: Exception) -> Response:
    """404 and 405."""
    assert isinstance(error, HTTPException), "registered for HTTPException only"
    return json_answer({"detail": error.detail}, error.status_code)
