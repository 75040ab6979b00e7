"""The demo: sixteen hospitals train one classifier. `hospital` is the tenant's program, `data` splits the patients, `story` tells."""
