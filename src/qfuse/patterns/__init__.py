"""What models write in plain ATen that one op of qfuse computes, as patterns."""
