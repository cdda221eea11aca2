// CacheBlockRef: shared ownership of one CacheBlock.
//
// Invariants:
// - A location is occupied in its pool exactly while at least one non-empty handle to it lives; the death of the last
//   handle releases that very slot, at once.
// - An empty handle has use_count() 0 and is not unique.
// - Handles must die before the pool that issued them.
//
// Ownership: intrusive count in a record that the pool allocates together with the parent, so copying never allocates.
// Thread safety: none; pool and handles belong to one thread at a time.

#ifndef TOKENSPEED_CORE_CACHE_BLOCK_REF_H_
#define TOKENSPEED_CORE_CACHE_BLOCK_REF_H_

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

namespace tokenspeed {

class BlockPool;

// One slot of one parent. Parents are numbered from 1; parent 0 is the null parent and is never located.
struct CacheBlockLocation {
  int32_t lcm_block_id = 0;
  int32_t slot_index = 0;

  friend auto operator<=>(const CacheBlockLocation&, const CacheBlockLocation&) = default;
};

struct CacheBlockLocationHash {
  std::size_t operator()(const CacheBlockLocation& location) const noexcept {
    return std::hash<uint64_t>()(uint64_t{static_cast<uint32_t>(location.lcm_block_id)} << 32 |
                                 static_cast<uint32_t>(location.slot_index));
  }
};

// What a cached block is to whoever caches it. Opaque to the pool, which only says when the last handle beside the
// cache's own appears or goes.
class CachedBlock {
 public:
  // The block has now this one owner left, or more than one again. Must not touch any handle.
  virtual void OnUnpinned() noexcept = 0;
  virtual void OnPinned() noexcept = 0;

 protected:
  ~CachedBlock() = default;
};

// The pool's record of one slot. Only reachable through a handle while the slot is occupied.
class CacheBlock {
 public:
  CacheBlockLocation Location() const { return location_; }
  int32_t group() const { return group_; }
  // Who caches the block; null when nobody does. Set through BlockPool.
  CachedBlock* cached() const { return cached_; }

 private:
  friend class BlockPool;
  friend class CacheBlockRef;

  BlockPool* pool_ = nullptr;
  CachedBlock* cached_ = nullptr;
  CacheBlockLocation location_;
  int32_t group_ = -1;
  int32_t owners_ = 0;
};

class CacheBlockRef {
 public:
  CacheBlockRef() = default;
  CacheBlockRef(const CacheBlockRef& other) noexcept : block_(other.block_) {
    if (block_ != nullptr) Share();
  }
  CacheBlockRef(CacheBlockRef&& other) noexcept : block_(std::exchange(other.block_, nullptr)) {}
  CacheBlockRef& operator=(const CacheBlockRef& other) noexcept {
    CacheBlockRef(other).swap(*this);
    return *this;
  }
  CacheBlockRef& operator=(CacheBlockRef&& other) noexcept {
    CacheBlockRef(std::move(other)).swap(*this);
    return *this;
  }
  ~CacheBlockRef() { reset(); }

  // Drops the target; the slot is released when this was the last handle.
  void reset() noexcept;
  void swap(CacheBlockRef& other) noexcept { std::swap(block_, other.block_); }

  int32_t use_count() const { return block_ == nullptr ? 0 : block_->owners_; }
  bool unique() const { return use_count() == 1; }
  bool IsOwnedBy(const BlockPool& pool) const { return block_ != nullptr && block_->pool_ == &pool; }

  explicit operator bool() const { return block_ != nullptr; }
  const CacheBlock* operator->() const { return block_; }
  friend bool operator==(const CacheBlockRef&, const CacheBlockRef&) = default;

 private:
  friend class BlockPool;
  // Takes over one owner already counted by the pool.
  explicit CacheBlockRef(CacheBlock* block) noexcept : block_(block) {}
  void Share() noexcept;

  CacheBlock* block_ = nullptr;
};

inline void swap(CacheBlockRef& a, CacheBlockRef& b) noexcept { a.swap(b); }

}  // namespace tokenspeed

#endif  // TOKENSPEED_CORE_CACHE_BLOCK_REF_H_
