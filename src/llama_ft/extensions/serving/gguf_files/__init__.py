"""Write models and adapters as GGUF files, for llama.cpp and Ollama."""
