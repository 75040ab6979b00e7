"""Secure aggregation: the sum of a cohort's vectors is the only thing anyone learns.

`site/protocol.md` is the specification (SA1), `site/threat-model.md` says against whom it holds and where it does not.
One primitive a file: `transcript`, `shamir`, `agreement`, `sealing`, `encoding`, `masks`; then the round as two machines,
`client` (at a site) and `server` (at the hub), over the messages of `messages` and the `manifest` all of them bind.
"""
