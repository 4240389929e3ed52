"""Measuring engines: sweeps over batch sizes, the machine they ran on, and the records they leave. Prints nothing."""
