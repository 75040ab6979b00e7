"""Federated training: `plan` is what is asked for, `parameters` how a model's file becomes one vector, `strategies` what is done
with an aggregate, `rounds` the run as a fold of entries and what follows next.
"""
