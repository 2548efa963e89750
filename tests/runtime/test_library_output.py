"""What a library prints by itself is one line, and nothing of ours is lost."""

import os

import pytest

from nash_mhc.bench.aot import hidden


def test_lines_of_a_library_become_one_and_those_after_are_shown(capfd, monkeypatch):
    monkeypatch.delenv("LIB_LOG", raising=False)
    with hidden("lib", "LIB_LOG"):
        os.write(2, b"E0101 trouble\n    @ 0x7f  frame\n    @ 0x80  frame\n")  # as C++ does
    os.write(2, b"ours\n")
    line, ours = capfd.readouterr().err.splitlines()
    assert "lib wrote 3 lines" in line and "LIB_LOG=0" in line and ours == "ours"
    with hidden("lib", "LIB_LOG"):
        pass
    assert capfd.readouterr().err == ""


def test_all_of_it_is_shown_to_who_asks_and_an_error_leaves_the_terminal_as_it_was(capfd, monkeypatch):
    monkeypatch.setenv("LIB_LOG", "0")
    with hidden("lib", "LIB_LOG"):
        os.write(2, b"trouble\n")
    assert capfd.readouterr().err == "trouble\n"
    monkeypatch.delenv("LIB_LOG")
    with pytest.raises(ZeroDivisionError), hidden("lib", "LIB_LOG"):
        os.write(2, b"trouble\n")
        raise ZeroDivisionError
    os.write(2, b"ours\n")
    assert capfd.readouterr().err.splitlines()[1:] == ["ours"]
