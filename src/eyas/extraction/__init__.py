"""Engines that run the target, the connector that records its hidden states, and the self-check."""
