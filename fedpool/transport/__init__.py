"""Connections: the one place in fedpool, beside `client`, with input and output.

`stream` is a byte channel whatever carries it, `peer` drives a wire session over one, `ssh` opens and accepts them in all three
directions with pinned keys, `local` over a Unix socket, `bulk` moves large objects, `identity` keeps the keys.
"""
