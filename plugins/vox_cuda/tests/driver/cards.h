/* What the stand-ins for NVIDIA's libraries share: the cards that the environment tells of.

   FAKE_CARDS (to NVML) and FAKE_CUDA_CARDS (to CUDA): `name,major,minor,total GB,free GB,flags` for
   each card, with semicolons between them. Flags: p, this process may not use it; m, it is split by
   MIG; s, its memory is the processor's. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
struct card { char name[64]; int major, minor; unsigned long long total, free; char flags[8]; };
static struct card cards[8];
static int count;
static int number(const char *name) {
    const char *text = getenv(name);
    return text ? atoi(text) : 0;
}
static void read_cards(const char *name) {
    char text[1024], *entry;
    snprintf(text, sizeof text, "%s", getenv(name) ? getenv(name) : "");
    for (entry = strtok(text, ";"); entry && count < 8; entry = strtok(NULL, ";"), count++) {
        struct card *card = &cards[count];
        sscanf(entry, "%63[^,],%d,%d,%llu,%llu,%7s", card->name, &card->major, &card->minor,
               &card->total, &card->free, card->flags);
    }
}
static int has(const struct card *card, char flag) { return strchr(card->flags, flag) != NULL; }
