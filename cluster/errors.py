"""The error tree of pdserve.

    PdserveError                     status 500
    ├── UserError                    exit status 2: a mistake of the person at the command line
    │   └── ConfigError              one line: dotted path, value, bound, remedy
    └── RequestError                 ends one request; carries an HTTP status
        ├── BadRequest               400
        ├── Overloaded               429/503 with Retry-After
        ├── NoWorker                 503 with Retry-After
        ├── WorkerLost               502, another worker may succeed
        ├── TransferFailed           502, another pair or a local prefill may succeed
        ├── LeaseExpired             502, a new prefill may succeed
        ├── EngineFailed             500, the engine died; another may succeed
        ├── DeadlineExceeded         504
        └── Cancelled                499, the client left

`retryable` says whether another worker may give a different result. Foreign errors (Ray's, vLLM's) are
translated once: Ray's in `router/transport.py`, vLLM's in `cluster/engine/vllm/`.
"""

from __future__ import annotations


class PdserveError(Exception):
    """Base of everything pdserve raises on purpose."""

    status: int = 500
    retryable: bool = False


class UserError(PdserveError):
    """A mistake of the person at the command line. Shown as one line; exit status 2."""


class ConfigError(UserError):
    """A value in a ClusterConfig that cannot be used.

    Args:
        path: dotted path of the field, e.g. `pools.decode.replicas.max`.
        problem: the value and the bound, e.g. `0 is below the minimum 1`.
        remedy: what to do about it; empty where the bound already says so.
    """

    def __init__(self, path: str, problem: str, remedy: str = "") -> None:
        self.path, self.problem, self.remedy = path, problem, remedy
        super().__init__(f"{path}: {problem}" + (f"; {remedy}" if remedy else ""))


class RequestError(PdserveError):
    """Ends one request. `retry_after_s` becomes the Retry-After header where set."""

    def __init__(self, message: str, *, retry_after_s: float | None = None, worker_id: str | None = None) -> None:
        self.message, self.retry_after_s, self.worker_id = message, retry_after_s, worker_id
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process borders; the default would lose the keyword arguments.
        return _rebuild, (type(self), self.message, self.retry_after_s, self.worker_id)


def _rebuild(
    kind: type[RequestError], message: str, retry_after_s: float | None, worker_id: str | None
) -> RequestError:
    return kind(message, retry_after_s=retry_after_s, worker_id=worker_id)


class BadRequest(RequestError):
    status = 400


class Overloaded(RequestError):
    status = 503


class TenantOverBudget(Overloaded):
    status = 429


class NoWorker(RequestError):
    status = 503
    retryable = True


class WorkerLost(RequestError):
    status = 502
    retryable = True


class TransferFailed(RequestError):
    status = 502
    retryable = True


class LeaseExpired(RequestError):
    status = 502
    retryable = True


class EngineFailed(RequestError):
    status = 500
    retryable = True


class DeadlineExceeded(RequestError):
    status = 504


class Cancelled(RequestError):
    status = 499
