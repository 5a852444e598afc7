// Gives the key map (keymap.h) a plain C interface, for ctypes. It is not thread-safe: the caller
// holds a lock.

#include "keymap.h"

using collective::KeyMap;

extern "C" {

void* keymap_new(uint64_t capacity) {
  KeyMap* map = new (std::nothrow) KeyMap(capacity);
  if (map != nullptr && !map->Start()) {
    delete map;
    return nullptr;
  }
  return map;
}

void keymap_free(void* map) { delete static_cast<KeyMap*>(map); }
uint64_t keymap_count(void* map) { return static_cast<KeyMap*>(map)->count(); }
uint64_t keymap_bytes(void* map) { return static_cast<KeyMap*>(map)->bytes(); }
const int64_t* keymap_keys(void* map) { return static_cast<KeyMap*>(map)->keys(); }

void keymap_find(void* map, const int64_t* keys, int64_t n, int64_t* rows) {
  static_cast<KeyMap*>(map)->Find(keys, n, rows);
}

int64_t keymap_find_or_insert(void* map, const int64_t* keys, int64_t n, int64_t* rows) {
  return static_cast<KeyMap*>(map)->FindOrInsert(keys, n, rows);
}

int64_t keymap_remove(void* map, const int64_t* rows, int64_t n, int64_t* from, int64_t* to) {
  return static_cast<KeyMap*>(map)->Remove(rows, n, from, to);
}

}  // extern "C"
