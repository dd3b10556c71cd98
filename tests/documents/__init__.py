"""The pages' code blocks: which there are, and what runs them."""
