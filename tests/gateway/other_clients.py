"""LangChain's and LlamaIndex's classes for OpenAI, asked as their pages show; prints what they were answered as JSON.

.cache/doors/bin/python tests/gateway/other_clients.py http://127.0.0.1:8080/v1
"""

import json
import sys

from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from llama_index.embeddings.openai import OpenAIEmbedding

TEXTS = ["A cat sleeps.", "A kitten naps."]


def main(url: str) -> None:
    said = {"base_url": url, "api_key": "none"}
    lang = OpenAIEmbeddings(model="embedder", check_embedding_ctx_length=False, **said)
    chat = ChatOpenAI(model="writer", temperature=0, max_completion_tokens=8, stream_usage=True, **said)
    llama = OpenAIEmbedding(model_name="embedder", api_base=url, api_key="none")
    whole = chat.invoke("Tell me a story.")
    pieces = list(chat.stream("Tell me a story."))
    result = {
        "langchain": [lang.embed_documents(TEXTS), [lang.embed_query(text) for text in TEXTS]],
        "llama_index": [llama.get_text_embedding_batch(TEXTS), [llama.get_query_embedding(text) for text in TEXTS]],
        "chat": [whole.content, "".join(piece.content for piece in pieces)],
        "tokens": whole.usage_metadata["output_tokens"],
    }
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
