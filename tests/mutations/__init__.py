"""Faults to plant in the package, one at a time: each must make a test fail. `make test-mutations` plants them all."""
