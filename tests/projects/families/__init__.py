"""One file per family of projects."""
