"""Starting and ending the tenant's programs: as local processes here; Slurm beside it comes with its own part."""
