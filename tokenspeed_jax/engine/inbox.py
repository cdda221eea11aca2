"""What other threads want of the step loop: requests, and commands to run between two steps, in order of arrival."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from tokenspeed_jax import scheduler as scheduling
from tokenspeed_jax.engine.requests import RequestState
from tokenspeed_jax.errors import EngineClosed, EngineStateError


@dataclass(frozen=True)
class Submission:
    """A validated request; `specs[i]` is the scheduler's view of `request.samples[i]`."""

    request: RequestState
    specs: list[scheduling.RequestSpec]


@dataclass(frozen=True)
class Question:
    """A command whose value, or error, another thread waits for."""

    function: Callable[[], Any]
    answer: Future[Any] = field(default_factory=Future)

    def __call__(self) -> None:
        if not self.answer.set_running_or_notify_cancel():
            return
        try:
            self.answer.set_result(self.function())
        except Exception as error:
            self.answer.set_exception(error)

    def refuse(self, error: Exception) -> None:
        """Whoever waits gets the error; the function does not run."""
        if self.answer.set_running_or_notify_cancel():
            self.answer.set_exception(error)

    def give_up(self) -> None:
        """The loop ended; whoever waits is told."""
        self.refuse(EngineClosed("the engine is closed"))


LiveRequestMode = Literal["keep", "drain", "abort"]
"""What becomes of the requests that run when the engine changes between two steps: they stay, or the change waits until
they have ended, or they are aborted."""


@dataclass(frozen=True)
class Change(Question):
    """A question that is asked once the requests that run have been dealt with."""

    mode: LiveRequestMode = "keep"


Command = Submission | Callable[[], None]


class Inbox:
    """Thread-safe, but `wait`, `arrived` and `end` are for the step loop.

    Attributes:
        queued: ids of requests none of whose samples has started; those that wait here included.
    """

    def __init__(self) -> None:
        self.queued: set[str] = set()
        self._commands: deque[Command] = deque()
        self._changed = threading.Condition()
        self._is_closing = False
        self._failure: BaseException | None = None
        self._refusal: str | None = None

    def __len__(self) -> int:
        return len(self._commands)

    @property
    def is_closing(self) -> bool:
        """Whether nothing is taken any more."""
        return self._is_closing

    @property
    def failure(self) -> BaseException | None:
        """What ended the loop, if it was not `close`."""
        return self._failure

    def post(self, *commands: Command) -> None:
        """Queues requests and commands, all or none; the loop finds them together.

        Raises:
            EngineClosed: the loop has ended or is ending.
            EngineStateError: a request, while none are taken.
        """
        requests = [command.request.request_id for command in commands if isinstance(command, Submission)]
        with self._changed:
            if self._failure is not None:
                raise EngineClosed("the engine has failed") from self._failure
            if self._is_closing:
                raise EngineClosed("the engine is closed")
            if requests and self._refusal is not None:
                raise EngineStateError(self._refusal)
            self.queued.update(requests)
            self._commands.extend(commands)
            self._changed.notify()

    def ask(self, function: Callable[[], Any]) -> Future[Any]:
        """Queues a command and returns its answer to come; raises as `post`."""
        question = Question(function)
        self.post(question)
        return question.answer

    def refuse_requests(self, reason: str | None, *, unless_waiting: bool = False) -> bool:
        """Refuses requests from now on, or takes them again for None.

        Returns:
            False, and then nothing was changed: `unless_waiting`, and a request lies here.
        """
        with self._changed:
            if unless_waiting and any(isinstance(command, Submission) for command in self._commands):
                return False
            self._refusal = reason
            return True

    def close(self) -> None:
        """Takes nothing any more, and lets the loop end."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()

    def wait(self, has_work: Callable[[], bool], on_idle: Callable[[], None]) -> bool:
        """Waits for a command, unless the loop has work; False when the loop has to end."""
        with self._changed:
            while not (self._is_closing or self._commands or has_work()):
                on_idle()
                self._changed.wait()
            return not self._is_closing

    def arrived(self) -> Iterator[Command]:
        """What lies here now, one by one: if a command fails, those behind it are still there to be answered."""
        for _ in range(len(self._commands)):
            yield self._commands.popleft()

    def end(self, failure: BaseException | None) -> list[RequestState]:
        """Closes, answers whoever waits, and returns the requests that nobody has looked at."""
        with self._changed:
            self._is_closing = True
            self._failure = failure
            left = list(self._commands)
            self._commands.clear()
        for command in left:
            if isinstance(command, Question):
                command.give_up()
        return [command.request for command in left if isinstance(command, Submission)]
