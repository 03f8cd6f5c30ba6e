"""Forms in which agents' traces are written. Each is read into messages as OpenAI's API has them."""
