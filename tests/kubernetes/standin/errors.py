"""Errors as the Kubernetes API answers them: a Status object with a reason for programs and a sentence for people."""

from __future__ import annotations

from typing import Any

from .kinds import Kind

Causes = list[tuple[str, str]]
"""(field, what is wrong with it)"""
_REASONS = {
    "Invalid value": "FieldValueInvalid",
    "Required value": "FieldValueRequired",
    "Unsupported value": "FieldValueNotSupported",
    "Duplicate value": "FieldValueDuplicate",
    "Not found": "FieldValueNotFound",
    "Too long": "FieldValueTooLong",
    "Forbidden": "FieldValueForbidden",
}


class ApiError(Exception):
    """Ends a request with this status."""

    def __init__(self, code: int, reason: str, message: str, details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details or {}

    def status(self) -> dict[str, Any]:
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            **({"details": self.details} if self.details else {}),
            "code": self.code,
        }


class Undecodable(ApiError):
    """An object with a field of the wrong type, which the server cannot even read."""

    def __init__(self, kind: Kind, why: str) -> None:
        self.why = why
        what = f'{kind.kind} in version "{kind.version}" cannot be handled as a {kind.kind}'
        super().__init__(400, "BadRequest", f"{what}: {why}")


def not_found(plural: str, name: str, group: str = "") -> ApiError:
    return ApiError(404, "NotFound", f'{_full(plural, group)} "{name}" not found', {"name": name, "kind": plural})


def no_resource() -> ApiError:
    return ApiError(404, "NotFound", "the server could not find the requested resource")


def no_method() -> ApiError:
    return ApiError(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")


def already_exists(plural: str, name: str, group: str = "") -> ApiError:
    message = f'{_full(plural, group)} "{name}" already exists'
    return ApiError(409, "AlreadyExists", message, {"name": name, "kind": plural})


def conflict(plural: str, name: str, why: str, group: str = "") -> ApiError:
    message = f'Operation cannot be fulfilled on {_full(plural, group)} "{name}": {why}'
    return ApiError(409, "Conflict", message, {"name": name, "kind": plural})


def modified(plural: str, name: str, group: str = "") -> ApiError:
    return conflict(
        plural,
        name,
        "the object has been modified; please apply your changes to the latest version and try again",
        group,
    )


def invalid(kind: str, name: str, causes: Causes, group: str = "") -> ApiError:
    """The reason of a cause stands in the first words of its message."""
    said = [f"{field}: {message}" for field, message in causes]
    text = said[0] if len(said) == 1 else f"[{', '.join(said)}]"
    known = {"name": name, "group": group, "kind": kind}
    details: dict[str, Any] = {field: value for field, value in known.items() if value}
    details["causes"] = [
        {"reason": _REASONS[message.partition(":")[0]], "message": message, "field": field} for field, message in causes
    ]
    return ApiError(422, "Invalid", f'{_full(kind, group)} "{name}" is invalid: {text}', details)


def bad_request(message: str) -> ApiError:
    return ApiError(400, "BadRequest", message)


def forbidden(message: str) -> ApiError:
    return ApiError(403, "Forbidden", message)


def expired(version: int | str, oldest: int) -> ApiError:
    return ApiError(410, "Expired", f"too old resource version: {version} ({oldest})")


def _full(plural: str, group: str) -> str:
    return f"{plural}.{group}" if group else plural
