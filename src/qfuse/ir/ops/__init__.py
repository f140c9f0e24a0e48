"""The ops of qfuse: schemas, references, and typed views of their nodes."""
