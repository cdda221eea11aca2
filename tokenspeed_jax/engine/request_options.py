"""`RequestOptions`: what a request asks of the scheduler, apart from how it is sampled."""

from dataclasses import dataclass

from tokenspeed_jax.errors import InvalidRequest

MAX_PRIORITY = 2**31 - 1
MAX_CACHE_SALT_BYTES = 65_536


@dataclass(frozen=True)
class RequestOptions:
    """Options of one request; all its samples share them. Raises `InvalidRequest` for a value outside its range.

    Attributes:
        priority: the lower, the earlier the request starts and the later it is retracted; among equals the first come
            is the first served. Nobody who runs is interrupted for it, unless the cache runs out.
        cache_salt: the prefix cache is shared only with requests of the same salt; None shares with all that have none.
    """

    priority: int = 0
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise InvalidRequest(f"priority must be an integer, got {self.priority!r}", parameter="priority")
        if not -MAX_PRIORITY - 1 <= self.priority <= MAX_PRIORITY:
            raise InvalidRequest(
                f"priority must lie in [{-MAX_PRIORITY - 1}, {MAX_PRIORITY}], got {self.priority}", parameter="priority"
            )
        if self.cache_salt is not None:
            self._check_salt(self.cache_salt)

    @staticmethod
    def _check_salt(salt: object) -> None:
        if not isinstance(salt, str) or not salt:
            raise InvalidRequest(f"cache_salt must be a non-empty string, got {salt!r}", parameter="cache_salt")
        try:
            size = len(salt.encode())
        except UnicodeEncodeError:
            raise InvalidRequest("cache_salt must be valid Unicode", parameter="cache_salt") from None
        if size > MAX_CACHE_SALT_BYTES:
            raise InvalidRequest(
                f"cache_salt must have at most {MAX_CACHE_SALT_BYTES} bytes, got {size}", parameter="cache_salt"
            )
