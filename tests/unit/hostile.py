"""A report whose names, lines of code and sentences try to leave the format that they are written in."""

from __future__ import annotations

import json

import make_report as m

from placement_audit.report.json_io import dumps, loads
from placement_audit.verdicts import Report

NAME = "a<script>alert(1)</script>|`b`]]>\n::error file=x,line=1::y%0A\"'&\x1b[31m**c**@octocat"
"""Stands in every hostile name."""

CODE = "x = '<img src=x onerror=alert(2)>' | \"]]>\" ``` # @octocat {{ 7*7 }}"

MESSAGE = "<b>bold</b> ```` |\n- [x](javascript:alert(3)) %25 \u2028 ::warning::"


def hostile_report() -> Report:
    """`make_report.mixed_report` with a hostile FQN, code line, model, note and message."""
    text = dumps(m.mixed_report())
    for plain, hostile in (
        ("layers.1.attention_norm", f"layers.1.{NAME}"),
        (m.USER_NORM.code_line, CODE),
        ("my_model/norm.py", "my model/no%rm,1:2.py"),
        ("simple_fsdp.llama3 debugmodel", f"model {NAME}"),
        ("2 ranks were taken for it.", MESSAGE),
        ("is never summed over tp.", f"is never summed: {MESSAGE}"),
    ):
        plain, hostile = (json.dumps(t)[1:-1] for t in (plain, hostile))
        assert plain in text, plain
        text = text.replace(plain, hostile)
    return loads(text)
