"""A process that is told to terminate ends its run first.

Paddle answers SIGTERM in C++, by aborting at once; Python's default is to die at once as well. Python
runs a handler between two instructions of the main thread, which may be stuck in a collective, and a
handler there would wait for locks that the thread itself holds. So nothing is done in the handler: the
interpreter's wake-up descriptor, written when the signal arrives, wakes a thread of ours.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

#: What is sent by a scheduler or a launcher, and when the terminal is closed.
SIGNALS = (signal.SIGTERM, signal.SIGHUP)

#: Set in the number of a signal that came through our handler and not from the interpreter itself.
_HANDED_ON = 0x80


class Terminator:
    """Calls `end` when the process is told to terminate, and then lets it die of the signal as before.

    Signals that the script handles itself, or ignores, are left alone.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end
        self._mine: list[int] = []
        self._wake_read = self._wake_write = -1

    def install(self) -> None:
        """Take over the signals nobody has taken. Only the main thread can; elsewhere nothing happens."""
        global _installed
        if threading.current_thread() is not threading.main_thread() or _installed is not None:
            return
        free = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
        if not free:
            return
        read, write = os.pipe()
        os.set_blocking(write, False)
        taken = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        if taken != -1:
            # An event loop's: it is put back, and the signals stay as they were.
            signal.set_wakeup_fd(taken)
            os.close(read)
            os.close(write)
            return
        self._wake_read, self._wake_write = read, write
        for number in free:
            signal.signal(number, self._handle)
            self._mine.append(number)
        _installed = self
        threading.Thread(target=self._watch, name="mlflow_tokens-signals", daemon=True).start()

    def remove(self) -> None:
        """Give the signals back. From another thread than the main one they stay, and do as before."""
        global _installed
        if threading.current_thread() is not threading.main_thread() or _installed is not self:
            return
        _installed = None
        taken = signal.set_wakeup_fd(-1)
        if taken != self._wake_write:
            signal.set_wakeup_fd(taken)
        self.restore()
        self.close_pipe()

    def restore(self) -> None:
        """Let the signals that are still ours do what they did before."""
        for number in self._mine:
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL)

    def close_pipe(self) -> None:
        """End the watching thread, where there is one."""
        write, self._wake_write = self._wake_write, -1
        os.close(write)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Wake the watching thread, if it is not awake.

        It is not where an event loop has put a descriptor of its own in the place of ours, and where a
        handler that the script has put in front of this one hands the signal on.
        """
        if self._wake_write == -1:
            _die_of(number)
        with suppress(OSError):
            os.write(self._wake_write, bytes([number | _HANDED_ON]))

    def _watch(self) -> None:
        while data := os.read(self._wake_read, 64):
            for byte in data:
                number = byte & ~_HANDED_ON
                handed_on = byte != number or signal.getsignal(number) == self._handle
                if number in self._mine and handed_on:
                    try:
                        self._end()
                    finally:
                        _die_of(number)
        os.close(self._wake_read)


_installed: Terminator | None = None


def _die_of(number: int) -> None:
    # signal.signal() is for the main thread alone, which may be stuck.
    ctypes.CDLL(None).signal(number, None)
    os.kill(os.getpid(), number)
    # The first process of a container does not die of it.
    time.sleep(1.0)
    os._exit(128 + number)


def _after_fork_in_child() -> None:
    """A child, such as a data loader's worker, dies of its signals, and does not wake its parent's thread."""
    global _installed
    if _installed is None:
        return
    terminator, _installed = _installed, None
    with suppress(ValueError, OSError):
        signal.set_wakeup_fd(-1)
        terminator.restore()
        terminator.close_pipe()


os.register_at_fork(after_in_child=_after_fork_in_child)
