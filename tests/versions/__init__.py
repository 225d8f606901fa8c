"""Run the whole suite with other versions of Python, torch and Lightning: `make test-versions`."""
