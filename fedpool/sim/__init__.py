"""Stand-ins for real sites: described by a few numbers or a TOML scenario, behind the same ports."""
