"""Python's `random` and numpy's global generator give numbers that follow from a key, where a key was told.

Torch's generator is seeded before each micro-batch, which takes a microsecond. Seeding these two takes five, and few
experiments draw from them. So a key is only noted, and the first draw after it seeds: a key costs a fifth of a
microsecond, a draw a fraction of one more.

For that `watch_draws` changes how a draw begins, in this process. The object behind the functions of `random` becomes
one of a class that looks for a key first. numpy's functions hold a lock of their bit generator while they draw: it
becomes a bit generator whose lock looks for a key first. Without a key all functions give the same numbers as before.
`draw = random.random` (or getrandbits), said before `watch_draws`, knows of no key, since it is a function in C.

Keys belong to a thread, so replicas in threads draw what one process does, each from a stream of its own. A thread that
was never told a key has the main thread's; what was drawn before the first key continues after `without_key`.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # commands that only read an experiment's file do without numpy
    import numpy as np

_Result = TypeVar("_Result")

_WORD = 2**32 - 1


def numpy_words(key: int) -> list[int]:
    """What numpy's generator is seeded with for a key below 2**64."""
    # Python's is the same algorithm, and seeded with the two words of a number of 64 bits alike: a third word keeps
    # numpy's numbers from being Python's.
    return [key & _WORD, key >> 32, 1]


class _Stream:
    """The numbers of one key after another: those of Python and those of numpy."""

    def __init__(self, python: random.Random | None) -> None:
        self.python = python
        """None for the numbers that this process draws without a key, from Python's own generator."""
        self.python_key: int | None = None
        self.numpy_key: int | None = None
        """The key that is told, and has not seeded the generator yet."""
        self.numpy_state: Any = None
        """Where numpy's numbers of this stream stand, while those of another stream are drawn."""
        self.python_chosen = self.numpy_chosen = False
        """Whether somebody has seeded the generator with a number."""


_unkeyed = _Stream(None)


class _Here(threading.local):
    stream: _Stream | None = None
    stream_around: _Stream | None = None
    """The stream around the innermost block of `without_key`, which goes on after it."""


_here = _Here()
_of_process = _unkeyed
"""The stream of the threads that have none: the main thread's."""
_watched: set[str] = set()


def _current() -> _Stream:
    return _here.stream or _of_process


def key_draws(key: int) -> None:
    """From here on this thread's draws from `random` and numpy's global generator follow from `key`, below 2**64."""
    global _of_process
    if not _watched:
        return  # somebody else's process keeps its generators as they are
    stream = _here.stream
    if stream is None or stream is _here.stream_around:
        stream = _here.stream = _Stream(random.Random(0))
        if threading.current_thread() is threading.main_thread():
            _of_process = stream
    stream.python_key = stream.numpy_key = key
    stream.python_chosen = stream.numpy_chosen = False


def seed_draws(key: int) -> None:
    """Seed what this thread draws from here on, as a key would; what somebody has seeded goes on as it is.

    Unlike `key_draws` it seeds the generators that this thread draws from already. Nothing where `watch_draws` was not
    called.
    """
    stream = _current()
    chosen = stream.python_chosen, stream.numpy_chosen
    if "random" in _watched and not stream.python_chosen:
        random.seed(key)
    if "numpy" in _watched and not stream.numpy_chosen:
        sys.modules["numpy"].random.seed(numpy_words(key))
    stream.python_chosen, stream.numpy_chosen = chosen


@contextlib.contextmanager
def without_key() -> Iterator[None]:
    """After this block this thread draws from the stream that it had before: without a key where it had none."""
    # A key that is told in the block begins another stream.
    global _of_process
    stream, around, of_process = _here.stream, _here.stream_around, _of_process
    _here.stream_around = stream
    try:
        yield
    finally:
        _here.stream, _here.stream_around = stream, around
        if threading.current_thread() is threading.main_thread():
            _of_process = of_process


class _Draws(random.Random):
    """Python's generator, whose numbers are the stream's."""

    def _drawn_from(self) -> random.Random:
        stream = _current()
        own = stream.python
        if own is None:
            return super()  # type: ignore[return-value]
        if stream.python_key is not None:
            own.seed(stream.python_key)
            stream.python_key = None
        return own

    def random(self) -> float:
        return self._drawn_from().random()

    def getrandbits(self, k: int, /) -> int:
        return self._drawn_from().getrandbits(k)

    def gauss(self, mu: float = 0.0, sigma: float = 1.0) -> float:
        return self._drawn_from().gauss(mu, sigma)  # it keeps every second number

    def seed(self, a: Any = None, version: int = 2) -> None:
        stream = _current()
        stream.python_key, stream.python_chosen = None, a is not None
        self._drawn_from().seed(a, version)

    def getstate(self) -> tuple[Any, ...]:
        return self._drawn_from().getstate()

    def setstate(self, state: tuple[Any, ...]) -> None:
        _current().python_key = None
        self._drawn_from().setstate(state)

    def __reduce__(self) -> Any:
        return _pythons_generator, ()  # a copy would seed the stream while it is made


def _pythons_generator() -> random.Random:
    """The object behind the functions of `random`."""
    generator: random.Random = random.seed.__self__  # type: ignore[attr-defined]
    return generator


class _Turn:
    """The lock that numpy's functions hold while they draw: whoever takes it finds the numbers of its own stream."""

    def __init__(self, numpy: np.random.RandomState) -> None:
        self._lock = threading.RLock()
        self._numpy = numpy
        # The stream whose numbers the generator holds now.
        self._holds = _unkeyed

    def __enter__(self) -> None:
        self._lock.acquire()
        stream = _current()
        if stream is not self._holds or stream.numpy_key is not None:
            try:
                self._bring(stream)
            except BaseException:  # a signal's handler may raise
                self._lock.release()
                raise

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def _bring(self, stream: _Stream) -> None:
        # numpy's functions take this lock again in here, and must find nothing left to do.
        key, stream.numpy_key = stream.numpy_key, None
        if stream is not self._holds:
            before, self._holds = self._holds, stream
            before.numpy_state = self._numpy.get_state(legacy=False)
            if key is None:
                self._numpy.set_state(stream.numpy_state)
        if key is not None:
            self._numpy.seed(numpy_words(key))


def _within(turn: _Turn, function: Callable[..., _Result]) -> Callable[..., _Result]:
    """numpy's function, which sets or reads the state without a lock, within the lock."""

    @wraps(function)
    def locked(*words: Any, **named: Any) -> _Result:
        with turn:
            return function(*words, **named)

    return locked


def _noted(seed: Callable[..., None]) -> Callable[..., None]:
    """numpy's function, which notes that somebody has called it with a number."""

    @wraps(seed)
    def noted(seed: Any = None) -> None:
        real(seed)
        _current().numpy_chosen = seed is not None

    real = seed
    return noted


def watch_draws() -> None:
    """Let draws from `random` and numpy's global generator look for a key, in this process, from here on."""
    # Called before a user's code is run, which may then take the functions by name. A second call does nothing. numpy
    # is left alone where it is not loaded: a process that trains has loaded it with torch.
    if "random" not in _watched:
        _watched.add("random")
        behind = _pythons_generator()
        names = [name for name, value in vars(random).items() if getattr(value, "__self__", None) is behind]
        behind.__class__ = _Draws
        for name in names:
            setattr(random, name, getattr(behind, name))
    if "numpy" not in _watched and "numpy" in sys.modules:
        _watched.add("numpy")
        _watch_numpy()


def _watch_numpy() -> None:
    from numpy import random as module

    behind: np.random.RandomState = module.get_state.__self__  # type: ignore[attr-defined]
    state = behind.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return  # somebody has chosen another one, which cannot be seeded
    turn = _Turn(behind)

    class MT19937(module.MT19937):  # numpy's states have the name of the class
        lock: Any = turn

        @property
        def state(self) -> Any:
            with turn:  # a copy asks here, and must not get the numbers of the stream that drew last
                return super().state

        @state.setter
        def state(self, state: Any) -> None:
            module.MT19937.state.__set__(self, state)  # type: ignore[attr-defined]

        def __reduce__(self) -> Any:
            return _plain_bits, (self.state,)

    module.set_bit_generator(MT19937())  # type: ignore[attr-defined]
    behind.set_state(state)
    for name in ("seed", "get_state", "set_state"):
        setattr(module, name, _within(turn, getattr(module, name)))
    module.seed = _noted(module.seed)


def _plain_bits(state: Any) -> np.random.BitGenerator:
    from numpy.random import MT19937

    bits = MT19937()
    bits.state = state
    return bits
