"""The protocol between ibshell, hub and sites, with no input or output: bytes in, events out.

`frames` cuts and bounds the control stream, `session` keeps the books of requests and answers, `messages` types the bodies,
`bulk` is the other kind of stream: large objects by offset.
"""
