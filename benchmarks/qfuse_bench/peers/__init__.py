"""The contenders: qfuse and its peers."""
