"""The demo: sixteen hospitals train one classifier.

`hospital` is the tenant's program, `model` what it trains, `data` splits the patients, `story` is the course of events.
"""
