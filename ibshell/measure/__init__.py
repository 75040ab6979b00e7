"""The project's own measurements. They print; they never judge: ratios stand beside a peer and the physical limit of the same run."""
