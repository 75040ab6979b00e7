import json

import pytest

from fedpool.errors import UsageError
from ibshell import render
from ibshell.render import Column

COLUMNS = [Column("SITE", "name"), Column("FREE", "free"), Column("UUID", "uuid", wide=True)]
ANSWER = {
    "items": [{"name": "京都", "free": 3, "uuid": "x"}, {"name": "zurich", "free": None, "uuid": "y"}],
    "errors": [],
    "as_of": {},
}


def test_a_table_is_aligned_by_terminal_cells():
    lines = render.listing(ANSWER, COLUMNS, "name", None, True).splitlines()
    assert lines == ["SITE    FREE", "京都    3", "zurich  -"]


def test_a_pipe_gets_tabs():
    assert render.listing(ANSWER, COLUMNS, "name", None, False).splitlines()[1] == "京都\t3"


def test_wide_shows_every_column():
    assert "UUID" in render.listing(ANSWER, COLUMNS, "name", "wide", True)


def test_machine_forms():
    assert json.loads(render.listing(ANSWER, COLUMNS, "name", "json", False)) == ANSWER
    assert [
        json.loads(line)["free"] for line in render.listing(ANSWER, COLUMNS, "name", "ndjson", False).splitlines()
    ] == [3, None]
    assert render.listing(ANSWER, COLUMNS, "name", "csv", False).splitlines()[0] == "name,free,uuid"
    assert render.listing(ANSWER, COLUMNS, "name", "name", False) == "京都\nzurich\n"
    assert render.listing(ANSWER, COLUMNS, "name", "yaml", False).startswith("items:\n  -\n    name:")


def test_an_empty_listing_is_an_empty_listing():
    empty = {"items": [], "errors": [], "as_of": {}}
    assert render.listing(empty, COLUMNS, "name", "name", False) == ""
    assert json.loads(render.listing(empty, COLUMNS, "name", "json", False))["items"] == []


def test_an_unknown_form_is_refused():
    with pytest.raises(UsageError, match="no output form 'xml'"):
        render.listing(ANSWER, COLUMNS, "name", "xml", False)


def test_a_foreign_name_cannot_move_the_cursor():
    assert "\x1b" not in render.cell("name", "evil\x1b[2Jname\n")
