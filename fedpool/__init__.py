"""What a pool is and how it decides. No sockets, clocks, files or processes here: those are passed in as ports.

The two exceptions are `fedpool.transport` (SSH connections) and `fedpool.client` (what a program or a command talks through).
"""

__version__ = "0.1.0"
