"""What depends on an architecture: text parts, heads, routers, embeddings, groups of parameters."""
