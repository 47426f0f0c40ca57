/* Logits of every column, in float32: `gguf_columns MODEL TOKENS OUT [LORA]`.

   TOKENS are numbers, separated by blanks. OUT gets a row of float32 for each. The cache is float32,
   and there is no flash attention. Built and called by gguf_in_llamacpp.py. */

#include <stdio.h>

#include "llama.h"

enum { MOST = 256 };

int main(int count, char ** given) {
    llama_token tokens[MOST];
    int n = 0;
    FILE * in = fopen(given[2], "r");
    while (n < MOST && fscanf(in, "%d", &tokens[n]) == 1) n++;

    llama_backend_init();
    struct llama_model * model = llama_model_load_from_file(given[1], llama_model_default_params());
    struct llama_context_params wanted = llama_context_default_params();
    wanted.n_ctx = wanted.n_batch = wanted.n_ubatch = MOST;
    wanted.type_k = wanted.type_v = GGML_TYPE_F32;
    wanted.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    struct llama_context * context = model ? llama_init_from_model(model, wanted) : NULL;
    if (!context) return 1;
    if (count > 4) {
        struct llama_adapter_lora * adapter = llama_adapter_lora_init(model, given[4]);
        float scale = 1.0f;
        if (!adapter || llama_set_adapters_lora(context, &adapter, 1, &scale)) return 2;
    }

    struct llama_batch batch = llama_batch_init(n, 0, 1);
    batch.n_tokens = n;
    for (int i = 0; i < n; i++) {
        batch.token[i] = tokens[i];
        batch.pos[i] = i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = 1;
    }
    if (llama_decode(context, batch)) return 3;

    int columns = llama_vocab_n_tokens(llama_model_get_vocab(model));
    FILE * out = fopen(given[3], "w");
    for (int i = 0; i < n; i++) fwrite(llama_get_logits_ith(context, i), sizeof(float), columns, out);
    return fclose(out);
}
