"""Configuration files: every error names the file's line, the key, the value and the remedy."""

import pytest

from agent.config import HubConfig, SiteConfig, load
from fedpool.errors import NotFound, UsageError
from fedpool.identity.keys import public_line

KEY = public_line(bytes(range(32)))
SITE = f"""\
name = "zurich"
socket = "zurich.sock"
hub_key = "{KEY}"

[simulated]
name = "zurich"
nodes = 2

[policy]
max_duration_s = 3600.0

[peers]
geneva = "{KEY}"
"""
HUB = f"""\
name = "hub"
socket = "hub.sock"

[users]
anna = "{KEY}"

[[site]]
name = "zurich"
key = "{KEY}"
address = "127.0.0.1:1"

[[site]]
name = "geneva"
key = "{KEY}"
mode = "reverse"
"""


def read(tmp_path, text, kind):
    path = tmp_path / "agent.toml"
    path.write_text(text)
    return load(path, kind)


def test_what_is_right_is_read(tmp_path):
    site, hub = read(tmp_path, SITE, SiteConfig), read(tmp_path, HUB, HubConfig)
    assert (site.simulated.nodes, site.policy.max_duration_s) == (2, 3600.0)
    assert [entry.name for entry in hub.site] == ["zurich", "geneva"]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("max_duration_s = 3600.0", 'max_duration_s = "long"', "line 10: max_duration_s: expected `float`, got `str`"),
        ("max_duration_s = 3600.0", "max_duration_s = -1.0", "line 10: max_duration_s = -1: it may be any positive"),
        ("max_duration_s = 3600.0", "max_duraton_s = 1.0", "line 10: unknown key 'max_duraton_s'"),
        ("nodes = 2", "nodes = 0", "line 7: nodes = 0: it may be 1 to"),
        ('name = "zurich"\nsocket', 'name = "zu/rich"\nsocket', "line 1: 'zu/rich' is no name"),
        (f'hub_key = "{KEY}"', 'hub_key = "ssh-rsa AAAA"', "line 3: "),
        (f'geneva = "{KEY}"', 'geneva = "ssh-rsa AAAA"', "line 13: "),
        (f'hub_key = "{KEY}"\n', "", "the key 'hub_key' is missing"),
        ("[policy]", "[policy", "is not TOML: "),
    ],
)
def test_a_site_is_told_where(tmp_path, old, new, says):
    assert SITE.count(old) == 1
    with pytest.raises(UsageError) as refused:
        read(tmp_path, SITE.replace(old, new), SiteConfig)
    assert says in refused.value.message and refused.value.message.startswith(f"{tmp_path}/agent.toml")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('mode = "reverse"', 'mode = "pigeon"', "line 15: mode = 'pigeon'"),
        ('mode = "reverse"', "", "line 12: site geneva: mode dial needs an address"),
        ('name = "geneva"', 'name = "zurich"', "line 13: it names the site 'zurich' twice"),
        ('name = "geneva"', 'nam = "geneva"', "line 13: unknown key 'nam'"),
        ('address = "127.0.0.1:1"', "address = 1", "line 10: address: expected `str`, got `int`"),
        (f'anna = "{KEY}"', 'anna = "x"', "line 5: "),
    ],
)
def test_a_hub_is_told_where(tmp_path, old, new, says):
    assert HUB.count(old) == 1
    with pytest.raises(UsageError) as refused:
        read(tmp_path, HUB.replace(old, new), HubConfig)
    assert says in refused.value.message


def test_a_mistyped_key_gets_a_suggestion(tmp_path):
    with pytest.raises(UsageError) as refused:
        read(tmp_path, SITE.replace("max_duration_s", "max_duration"), SiteConfig)
    assert refused.value.hint == "did you mean 'max_duration_s'?"


def test_no_file_at_all(tmp_path):
    with pytest.raises(NotFound, match="no configuration at"):
        load(tmp_path / "nothing.toml", HubConfig)
