"""What may be a name of a site, tenant, run or pool: it ends up in file names, host names and terminals."""

import re

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
RULE = "letters, digits, '.', '_', '-', beginning with a letter or digit, at most 63"
