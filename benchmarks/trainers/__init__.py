"""llama_ft against other trainers, with the jobs that run them in environments of their own."""
