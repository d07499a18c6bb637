"""The door for clients that speak OpenAI's API, or TEI's: HTTP in front of a server's gRPC, keys and limits."""
