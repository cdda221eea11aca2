#include "core/cache_block_ref.h"

#include "core/block_pool.h"

namespace tokenspeed {

void CacheBlockRef::reset() noexcept {
  CacheBlock* block = std::exchange(block_, nullptr);
  if (block == nullptr) return;
  BlockPool& pool = *block->pool_;
  ++pool.dropped_handles_;
  pool.CountHandles(*block, -1);
  if (--block->owners_ == 0) {
    pool.Release(*block);
  } else if (block->owners_ == 1 && block->cached_ != nullptr) {
    pool.CountEvictable(*block, 1);
    block->cached_->OnUnpinned();
  }
}

void CacheBlockRef::Share() noexcept {
  block_->pool_->CountHandles(*block_, 1);
  if (block_->owners_++ == 1 && block_->cached_ != nullptr) {
    block_->pool_->CountEvictable(*block_, -1);
    block_->cached_->OnPinned();
  }
}

}  // namespace tokenspeed
