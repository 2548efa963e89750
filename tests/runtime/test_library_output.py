"""Output of libraries is reduced to one line, and ours is not lost."""

import os

import pytest

from nash_mhc.bench.step import hide_stderr


def test_library_output_becomes_one_line(capfd, monkeypatch):
    monkeypatch.delenv("LIB_LOG", raising=False)
    with hide_stderr("lib", "LIB_LOG"):
        os.write(2, b"E0101 trouble\n    @ 0x7f  frame\n    @ 0x80  frame\n")  # as C++ does
    os.write(2, b"ours\n")
    line, ours = capfd.readouterr().err.splitlines()
    assert "3 lines of lib" in line and "LIB_LOG=0" in line and ours == "ours"
    with hide_stderr("lib", "LIB_LOG"):
        pass
    assert capfd.readouterr().err == ""


def test_library_output_can_be_shown_and_errors_restore_the_terminal(capfd, monkeypatch):
    monkeypatch.setenv("LIB_LOG", "0")
    with hide_stderr("lib", "LIB_LOG"):
        os.write(2, b"trouble\n")
    assert capfd.readouterr().err == "trouble\n"
    monkeypatch.delenv("LIB_LOG")
    with pytest.raises(ZeroDivisionError), hide_stderr("lib", "LIB_LOG"):
        os.write(2, b"trouble\n")
        raise ZeroDivisionError
    os.write(2, b"ours\n")
    assert capfd.readouterr().err.splitlines()[1:] == ["ours"]
