"What is written about an exception that is hard to describe."

from types import TracebackType

import pytest

from multigpu_ft.run.errors import frame_lines, short_frames
from multigpu_ft.run.processes import read_error, write_error


class Unspeakable(Exception):
    def __str__(self):
        raise KeyError("no such text")


def _without_a_line():
    """Return an exception whose last frame has no line number.

    A signal's exception may be raised at an instruction of the compiler's own. Here it is the one
    that copies the variables of a closure."""
    reason = "planted"

    def closure():
        raise ZeroDivisionError(reason)

    try:
        closure()
    except ZeroDivisionError as error:
        frame = error.__traceback__.tb_next.tb_frame
        assert (0, 2, None) in frame.f_code.co_lines()
        return error.with_traceback(TracebackType(None, frame, 0, -1))


@pytest.mark.parametrize("raised_while_handling", [False, True])
def test_an_exception_without_a_line_is_written(tmp_path, raised_while_handling):
    error = _without_a_line()
    if raised_while_handling:
        cause, error = error, RuntimeError("later")
        error.__context__ = cause
    write_error(tmp_path / "error.json", error)
    written = read_error(tmp_path / "error.json")
    assert written["type"] == type(error).__name__ and "planted" in written["py_callstack"]
    shown = frame_lines(short_frames(error))[-1]
    assert shown.endswith("test_error_files.py, in closure")
    assert written["frames"][-1]["line"] is None


def test_an_exception_whose_text_fails_is_written(tmp_path):
    write_error(tmp_path / "error.json", Unspeakable())
    written = read_error(tmp_path / "error.json")
    assert written["type"] == "Unspeakable"
    assert written["text"] == "(its own text failed: KeyError)"


def test_a_chain_is_followed_by_identity(tmp_path):
    class Equal(Exception):
        __hash__ = None

        def __eq__(self, other):
            return True

    outer, inner = Equal("outer"), Equal("inner")
    outer.__cause__ = inner
    assert {"cause": "Equal: inner"} in short_frames(outer)
